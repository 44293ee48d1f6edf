# SPDX-License-Identifier: Apache-2.0
"""The length of the steps that follow a plan for GPU memory, from those before it.

The drive works beside forward and backward passes too: reads of state begin as soon as staging buffers are free, and
the last writes go on when the step has returned. As many bytes move there as the buffers take in either direction, if
the passes are long enough.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FixedPart:
    """What no plan changes of a step.

    Attributes:
        passes_seconds: of the step without what it takes longer for updates, and without what weights and activations
            cost that can move.
        forward_seconds: of its first forward pass.
        hidden_share: of an update outside GPU memory, what goes on beside the next forward pass from now on.
        staging_nbytes: buffers for optimizer state on its way from and to NVMe.
    """

    passes_seconds: float
    forward_seconds: float
    hidden_share: float
    staging_nbytes: int


def nvme_bytes_per_s(
    stored_nbytes: int, update_seconds: float, passes_seconds: float, staging_nbytes: int
) -> float | None:
    """The rate of reads and writes together in a step that waited for NVMe.

    Args:
        stored_nbytes: of state on NVMe, read and written once each.
        update_seconds: of its update.
        passes_seconds: of the rest of it, in which no update goes on.
        staging_nbytes: buffers for this state.

    Returns:
        Bytes per second; None where no state is on NVMe.
    """
    if not stored_nbytes:
        return None
    nbytes, ahead_nbytes = 2 * stored_nbytes, 2 * min(staging_nbytes, stored_nbytes)
    all_the_time = nbytes / max(update_seconds + passes_seconds, 1e-6)
    if all_the_time * passes_seconds <= ahead_nbytes:
        return all_the_time
    return max((nbytes - ahead_nbytes) / max(update_seconds, 1e-6), all_the_time)


def transfer_seconds_beside(passes_seconds: float, staging_nbytes: int, nvme_bytes_per_s: float) -> float:
    """How long an update's transfers go on beside passes, at most.

    Args:
        passes_seconds: in which no update goes on.
        staging_nbytes: buffers for optimizer state.
        nvme_bytes_per_s: of reads and writes together.
    """
    return min(2 * staging_nbytes / nvme_bytes_per_s, passes_seconds)


def predicted_seconds(
    step: FixedPart,
    *,
    waits_seconds: float,
    arithmetic_seconds: float,
    update_seconds: float,
    nvme_bytes_per_s: float | None,
) -> float:
    """The length of the next steps. None is shorter than its update, which is over before the next one begins.

    Args:
        step: a typical one before the plan.
        waits_seconds: for weights and activations that are not in GPU memory.
        arithmetic_seconds: of the update of state outside GPU memory.
        update_seconds: of that update, which takes as long as the slower one of arithmetic and transfers.
        nvme_bytes_per_s: of reads and writes together; None where no state is on NVMe.
    """
    exposed = update_seconds
    if nvme_bytes_per_s is not None and update_seconds > arithmetic_seconds:
        beside = transfer_seconds_beside(step.passes_seconds, step.staging_nbytes, nvme_bytes_per_s)
        exposed = max(update_seconds - beside, arithmetic_seconds)
    hidden = min(step.hidden_share * exposed, step.forward_seconds)
    return max(step.passes_seconds + waits_seconds + exposed - hidden, update_seconds)
