# SPDX-License-Identifier: Apache-2.0
"""What more host memory would give a training that is running, from one of its own steps instead of a probe.

A step is taken apart into forward and backward passes, which more host memory leaves alone; waits of these passes for
weights from NVMe, in proportion to the weights there; and the part of the optimizer step that nothing hides. An update
takes as long as the slower of two things that run side by side, the processor's arithmetic and the transfers of state;
at most as much of it as now is hidden behind the next forward pass. As much as the staging buffers take is moved beside
the passes (:mod:`tencache_ds.planning.step_prediction`).

More host memory takes weights from NVMe first, and then state, as :mod:`tencache_ds.placement.places` does. Imports
neither torch nor DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tencache_ds.planning.step_prediction import nvme_bytes_per_s, transfer_seconds_beside

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
