# SPDX-License-Identifier: Apache-2.0
"""Predictions from a job's own steps: their length after a plan for GPU memory, and with more host memory. Imports
neither torch nor DeepSpeed.

The drive works beside forward and backward passes too: reads of state begin as soon as staging buffers are free, and
the last writes go on when the step has returned. As many bytes move there as the buffers take in either direction, if
the passes are long enough.

A step is taken apart into forward and backward passes, which more host memory leaves alone; waits of these passes for
weights from NVMe, in proportion to the weights there; and the part of the optimizer step that nothing hides. An update
takes as long as the slower of two things that run side by side, the processor's arithmetic and the transfers of state;
at most as much of it as now is hidden behind the next forward pass.

More host memory takes weights from NVMe first, and then state, as :mod:`tencache_ds.placement.places` does.
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


# More host memory


NVME_BOUND_SHARE = 0.1
"""An update that waits for NVMe for a smaller share of its time is limited by its arithmetic, and shows no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step of one rank in the steady state, and what was on NVMe in it.

    Attributes:
        seconds: of the step.
        weight_wait_seconds: of its passes' waits for weights from NVMe.
        update_seconds: of the optimizer step, including what continues behind the training.
        update_wait_seconds: of these, what the optimizer step itself waited for NVMe.
        behind_seconds: of these, what ran behind the next forward pass.
        behind_wait_seconds: what the training waited for that part.
        nvme_nbytes: read and written.
        stored_weight_nbytes: bytes of weights on NVMe.
        stored_state_nbytes: bytes of optimizer state on NVMe, as stored.
        state_in_memory_nbytes: host memory that this state would take; more where its master weights are split.
        staging_nbytes: buffers for it on its way from and to NVMe.
    """

    seconds: float
    weight_wait_seconds: float = 0.0
    update_seconds: float = 0.0
    update_wait_seconds: float = 0.0
    behind_seconds: float = 0.0
    behind_wait_seconds: float = 0.0
    nvme_nbytes: float = 0.0
    stored_weight_nbytes: int = 0
    stored_state_nbytes: int = 0
    state_in_memory_nbytes: int = 0
    staging_nbytes: int = 0

    @property
    def stored_nbytes(self) -> int:
        """Host memory that everything on NVMe would take."""
        return self.stored_weight_nbytes + self.state_in_memory_nbytes

    @property
    def hidden_seconds(self) -> float:
        """Seconds of the update that the next forward pass hides."""
        return max(self.behind_seconds - self.behind_wait_seconds, 0.0)

    @property
    def passes_seconds(self) -> float:
        """Seconds of forward and backward passes, without waits for weights."""
        exposed = max(self.update_seconds - self.hidden_seconds, 0.0)
        return max(self.seconds - self.weight_wait_seconds - exposed, 0.0)

    @property
    def arithmetic_seconds(self) -> float:
        """Seconds of the update, without its waits for NVMe."""
        return max(self.update_seconds - self.update_wait_seconds, 0.0)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The step with more host memory.

    Attributes:
        more_nbytes: of host memory for this rank.
        seconds: of the step.
        passes_seconds: of forward and backward passes.
        nvme_seconds: of waits for NVMe that nothing hides.
        arithmetic_seconds: of the update's arithmetic, as far as nothing hides it.
        nvme_nbytes: read and written in a step.
    """

    more_nbytes: int
    seconds: float
    passes_seconds: float
    nvme_seconds: float
    arithmetic_seconds: float
    nvme_nbytes: float


def outlook(step: ObservedStep, more_nbytes: int) -> Outlook:
    """The step of a rank that gets more host memory; never longer than the observed one.

    Args:
        step: as observed.
        more_nbytes: of host memory for this rank, at least 0.
    """
    left = max(more_nbytes - step.stored_weight_nbytes, 0)
    # Where no weights are on NVMe, waits and reads of the passes have other causes, and stay.
    weights_share = _share(max(step.stored_weight_nbytes - more_nbytes, 0), step.stored_weight_nbytes, nothing=1.0)
    state_share = _share(max(step.state_in_memory_nbytes - left, 0), step.state_in_memory_nbytes)

    # State is read and written once, and so are new weights written, by the update; reads of weights are the rest.
    state_nbytes = 2 * step.stored_state_nbytes
    update_nbytes = state_nbytes + step.stored_weight_nbytes
    update_share = _share(state_share * state_nbytes + weights_share * step.stored_weight_nbytes, update_nbytes)
    read_nbytes = max(step.nvme_nbytes - update_nbytes, 0.0)

    if step.update_wait_seconds > NVME_BOUND_SHARE * step.update_seconds:
        update = max(step.arithmetic_seconds, _transfer_seconds(step, update_share))
    else:
        update = step.arithmetic_seconds + update_share * (step.update_seconds - step.arithmetic_seconds)
    hidden = min(step.hidden_seconds, _share(step.behind_seconds, step.update_seconds) * update)
    arithmetic = min(max(step.arithmetic_seconds - hidden, 0.0), update - hidden)
    waits = weights_share * step.weight_wait_seconds + update - hidden - arithmetic
    passes = step.passes_seconds
    nvme_nbytes = weights_share * read_nbytes + update_share * min(update_nbytes, step.nvme_nbytes)
    return Outlook(more_nbytes, passes + waits + arithmetic, passes, waits, arithmetic, nvme_nbytes)


def _transfer_seconds(step: ObservedStep, share: float) -> float:
    """What the update takes for a share of the bytes that it moves now, when these limit it. Beside passes in which no
    update goes on, as many move as the buffers take."""
    passes = max(step.passes_seconds - step.hidden_seconds, 0.0)
    rate = nvme_bytes_per_s(step.stored_state_nbytes, step.update_seconds, passes, step.staging_nbytes)
    if rate is None:
        return share * step.update_seconds
    beside = transfer_seconds_beside(passes, step.staging_nbytes, rate)
    return max(share * (step.update_seconds + beside) - beside, 0.0)


def _share(part: float, whole: float, *, nothing: float = 0.0) -> float:
    return part / whole if whole else nothing
