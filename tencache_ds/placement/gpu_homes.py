# SPDX-License-Identifier: Apache-2.0
"""The data of one DeepSpeed engine in GPU memory: planned after the first steps, released when training needs the
memory, and taken again when it does not.

Where everything fits into what the first step left free, there is nothing to decide. Otherwise later steps are
observed: for which weights the device waits, and what the update costs. They have to be like those that follow: in the
second, DeepSpeed fetches ahead for the first time, and allocators, kernels and pages are being warmed up. So they are
those from the third on (:mod:`tencache_ds.placement.step_observer`).
See [Note: memory that training needs] in :mod:`tencache_ds.placement.memory_watch` for what comes after.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tencache_ds.config import Share, TenCacheConfig
from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.layout import gib
from tencache_ds.memory.device_memory import CudaMemory, DeviceMemory
from tencache_ds.observability.counters import StepRecord
from tencache_ds.placement.activation_homes import ActivationHomes
from tencache_ds.placement.gpu_policy import (
    GpuBudget,
    GpuPlan,
    SavedItem,
    StateChunk,
    StepCosts,
    UpdateRates,
    Weight,
    gpu_budget,
    headroom,
    limit_nbytes,
)
from tencache_ds.placement.memory_watch import MemoryWatch
from tencache_ds.placement.moves import Agree, GpuMoves, Shard
from tencache_ds.placement.places import GpuUsage, Place
from tencache_ds.placement.step_observer import WARM_UP_STEPS, StepObserver, StepTimes
from tencache_ds.planning.step_prediction import FixedPart, nvme_bytes_per_s, predicted_seconds
from tencache_ds.profiling.waits import FetchRecorder, MoveCost
from tencache_ds.tiers.device_update import TritonAdam
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.optimizer_state import OptimizerStateTier

logger = logging.getLogger("DeepSpeed.tencache")

QUANTUM_SHARE = 0.5
"""Share of the headroom that leaves in addition to what has to, because each move waits for the device."""

INITIAL_SHARE = 0.7
"""Upper limit for state that fits nowhere else, as a share of the memory that is free before the first pass."""

HIDDEN_SHARE = 0.02
"""Share of a weight's copy time that is lost even where the device never waits for the copy."""

MORE_NBYTES = 8 * 2**30
"""The log estimates the gain from this much additional GPU memory."""


def open_device(on_cuda: bool, fused: FusedAdam) -> tuple[DeviceMemory, TritonAdam] | None:
    """The memory of the compute device and the kernel for state in it; None where neither is worth having.

    Raises:
        ConfigError: there is no Triton.
    """
    if not on_cuda:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaMemory(device, fused.copy, _open_lent_memory(device))
    return memory, TritonAdam(device, tail_contracted=fused.tail_contracted)


def _open_lent_memory(device: torch.device) -> Any | None:
    """GPU memory that torch's allocator can take back; None where that is not possible."""
    from tencache_ds.ops.tencache_lend import load_tencache_lend  # which imports DeepSpeed

    try:
        torch.cuda.init()
        return load_tencache_lend().open_device(device.index)
    except (ConfigError, RuntimeError) as error:  # RuntimeError: another allocator than torch's own is in use
        logger.warning("what is in GPU memory leaves it between steps only, not within an allocation: %s", error)
        return None


def initial_gpu_nbytes(usage: GpuUsage, wanted: int | Share | None) -> int:
    """GPU memory for optimizer state that has no other place, before anything is known about what training needs.

    Args:
        usage: before the first pass.
        wanted: the user's ``gpu_memory``.
    """
    most_nbytes = limit_nbytes(usage, wanted)
    if most_nbytes is None:
        return int(INITIAL_SHARE * usage.available_nbytes)
    return min(most_nbytes, usage.available_nbytes)


class GpuHomes:
    """Used by the training thread.

    Args:
        options: of the user.
        memory: of the compute device.
        tier: the optimizer's state.
        n_sub_groups: of the optimizer's state.
        shards: the weights that may be there, in the same order on every rank.
        moves: carries out the decisions.
        host_left_nbytes: what of this rank's host memory nothing has taken.
        host_room_nbytes: host memory that state may take at once where an allocation needs its GPU memory.
        hidden_share: the share of the update outside GPU memory that overlaps the next forward pass.
        without_fetches: whether modules whose weights are there run without a fetch.
        update_waits: seconds that this process has waited for updates so far.
        agree: among all ranks.
        record_fetches: sets the recorder of weight fetches, or none.
        activations: those that compete for the memory; None if they stay, or move in any case.
        say: tells the user, on one rank; with the predicted seconds of a step, where they are known.
    """

    def __init__(
        self,
        options: TenCacheConfig,
        memory: DeviceMemory,
        tier: OptimizerStateTier,
        n_sub_groups: int,
        shards: Callable[[], Sequence[Shard]],
        moves: GpuMoves,
        *,
        host_left_nbytes: Callable[[], int],
        host_room_nbytes: Callable[[], int],
        hidden_share: Callable[[], float],
        without_fetches: bool,
        update_waits: Callable[[], float],
        agree: Agree,
        record_fetches: Callable[[FetchRecorder | None], None],
        say: Callable[[str, float | None], None],
        activations: ActivationHomes | None = None,
    ) -> None:
        self._options = options
        self._memory = memory
        self._tier = tier
        self._n_sub_groups = n_sub_groups
        self._shards = shards
        self._moves = moves
        self._host_left_nbytes = host_left_nbytes
        self._host_room_nbytes = host_room_nbytes
        self._hidden_share = hidden_share
        self._without_fetches = without_fetches
        self._agree = agree
        self._say = say
        # A limit of the user's is for weights, gradients and state: what activations leave of it is not theirs.
        self._activations = activations if options.gpu_memory is None else None
        self._watch = MemoryWatch()
        self._update_waits = update_waits
        self._observer = StepObserver(memory.device.type == "cuda", record_fetches, update_waits)
        self._n_steps = 0
        self._planning_seconds = 0.0  # which the next step begins with
        self._t_forward_s = self._waited_before_s = 0.0
        self._forward_seconds: float | None = None  # of the first pass of this step
        self._planned = False
        self._stuck = False
        # Chunks of each sub-group, and weights (keys).
        self._handed_back: tuple[list[int], frozenset[int]] | None = None
        self._left_nbytes = self._pool_nbytes = 0
        self._taken_nbytes = memory.taken_nbytes
        memory.step_done(host_room_nbytes())
        memory.record()

    # Between two steps

    @property
    def settled(self) -> bool:
        """Whether steps are no longer measured."""
        return self._planned

    @property
    def releasable_nbytes(self) -> int:
        """Optimizer state that leaves GPU memory within a pass that needs it."""
        return self._moves.state_nbytes if self._memory.lends and not self._stuck else 0

    def step_done(self, record: StepRecord, before: StepRecord | None, update_seconds: float) -> None:
        """An optimizer step is over, but for what continues behind the next forward pass.

        Args:
            record: its figures.
            before: those of the step before, with all of its update; None of the first.
            update_seconds: what the optimizer took of it before it returned, all sub-groups together; 0 if the step was
                skipped.
        """
        self._note_taken()
        if self._left_nbytes:
            self._moves.collect()
            self._moves.release_gradients()
        if self._handed_back is not None:
            self._report_left()
        elif not self._planned:
            self._report_left()
            t_start_s = time.perf_counter()
            self._plan(record, before, update_seconds)
            self._planning_seconds = time.perf_counter() - t_start_s
        else:
            self._adapt()
        self._forward_seconds = None
        if self._memory.lends:
            self._memory.step_done(self._host_room_nbytes())
        if self._planned:
            self._memory.record()

    def _note_taken(self) -> None:
        """Counts what training has taken back within allocations."""
        nbytes = self._memory.taken_nbytes - self._taken_nbytes
        if nbytes:
            self._taken_nbytes += nbytes
            self._watch.released()
            self._left_nbytes += nbytes

    def _report_left(self) -> bool:
        """Says what has left GPU memory in this step, if anything has."""
        if not self._left_nbytes:
            return False
        logger.warning(
            "training needed GPU memory in this step: %s of optimizer state left it, %s are still there",
            gib(self._left_nbytes),
            gib(self._moves.state_nbytes),
        )
        self._left_nbytes = 0
        return True

    def _adapt(self) -> None:
        """Gives back what training needs, and takes what it no longer does."""
        usage, watch = self._memory.usage(), self._watch
        short_nbytes = watch.step_done(usage)
        if short_nbytes > 0 and not self._stuck:
            self._give_back(short_nbytes)
        if self._report_left():
            return
        spare_nbytes = min(watch.spare_nbytes(), self._allowed_nbytes(usage))
        if spare_nbytes > 0 and self._moves.bring_back(spare_nbytes):
            watch.came_back()
            self._stuck = False
            self._memory.synchronize()
            self._memory.trim()
            self._report("training has not needed the memory for some time", None, None)

    def _allowed_nbytes(self, usage: GpuUsage) -> int:
        """The unused part of the user's limit; without one, where state leaves for it, what torch's allocator does not
        hold."""
        most_nbytes = limit_nbytes(usage, self._options.gpu_memory)
        if most_nbytes is not None:
            return max(most_nbytes - self._moves.nbytes, 0)
        return usage.free_nbytes - self._watch.headroom_nbytes if self._memory.lends else usage.available_nbytes

    # The plan

    def _plan(self, record: StepRecord, before: StepRecord | None, update_seconds: float) -> None:
        """After the first step, where everything fits; else after one that is like those that follow, by its costs."""
        self._memory.synchronize()
        self._n_steps += 1
        usage = self._memory.usage()
        self._pool_nbytes = max(self._pool_nbytes, usage.pool_nbytes)
        budget = self._budget(usage)
        shards = self._shards()
        chunks = self._chunks(shards)
        there = self._moves.counts()
        moved = {} if self._activations is None else dict(self._activations.measured())
        free = {position: SavedItem(cost.nbytes, 0.0) for position, cost in moved.items()}
        costs = StepCosts([self._weight(shard, 0.0) for shard in shards], UpdateRates(1.0), free)
        fits = costs.fits(chunks, budget.nbytes, budget.lasting_nbytes)
        everything = fits and (bool(moved) or not self._moves_activations)
        typical = None
        if not self._agree("whether everything fits into GPU memory", everything, all):
            if self._n_steps < WARM_UP_STEPS:
                return
            seconds = record.seconds - self._planning_seconds
            if before is not None:
                self._observer.step_done(record, before, seconds, update_seconds, self._forward_seconds or 0.0)
            if self._agree("whether more steps are to be observed", not self._observer.has_enough, any):
                clock = self._observer.begin_step(seconds)
                if self._activations is not None:
                    self._activations.measure(clock)
                    self._memory.record()  # the peak without what is going to move
                return
            typical = self._observer.typical
            costs = self._costs(typical, shards, chunks, moved)
        plan = costs.plan(chunks, budget.nbytes, budget.lasting_nbytes, sum(there))
        self._observer.close()
        self._planned = True
        self._watch.settle(headroom(usage, can_leave=self._memory.lends), usage)
        t_start_s = time.perf_counter()
        leaving = costs.leaving(self._carry_out(plan, costs, shards, chunks, budget))
        if self._activations is not None:
            self._activations.follow(leaving)
        self._memory.synchronize()
        self._memory.trim()
        reason, predicted = budget.reason, None
        if typical is not None:
            nbytes, lasting_nbytes = budget.nbytes + MORE_NBYTES, budget.lasting_nbytes + MORE_NBYTES
            more = costs.plan(chunks, nbytes, lasting_nbytes, sum(there))
            step = FixedPart(
                max(typical.passes - sum(costs.seconds), 0.0),
                typical.forward,
                self._hidden_share(),
                self._staging_nbytes(),
            )
            predicted = self._predicted_seconds(step, plan, chunks, costs)
            with_more = self._predicted_seconds(step, more, chunks, costs)
            reason += f"; a step should take {predicted:.2f} s instead of {typical.total:.2f} s, "
            reason += f"with {gib(MORE_NBYTES)} more {with_more:.2f} s"
        self._report(reason, predicted, time.perf_counter() - t_start_s)

    def _predicted_seconds(
        self, step: FixedPart, plan: GpuPlan, chunks: Sequence[Sequence[StateChunk]], costs: StepCosts
    ) -> float:
        there = (*plan.weights, *plan.activations)
        waits = sum(seconds for seconds, is_there in zip(costs.seconds, there, strict=True) if not is_there)
        return predicted_seconds(
            step,
            waits_seconds=waits,
            arithmetic_seconds=self._numel_outside(chunks, plan.chunks) / costs.rates.params_per_s,
            update_seconds=plan.update_seconds,
            nvme_bytes_per_s=costs.rates.nvme_bytes_per_s,
        )

    def _staging_nbytes(self) -> int:
        """Bytes of the buffers for chunks; 0 where no state is on NVMe."""
        return self._tier.n_buffers * max(self._tier.chunk_nbytes, default=0)

    def _budget(self, usage: GpuUsage) -> GpuBudget:
        """The smallest of all ranks' budgets, the current contents included."""
        elsewhere_nbytes = None
        if self._memory.lends:
            # What leaves RAM has room there to return to, unless that takes state from NVMe.
            left_nbytes = 0 if self._moves.any_on_nvme else self._tier.resident_nbytes
            elsewhere_nbytes = self._host_room_nbytes() + left_nbytes
        wanted_nbytes = limit_nbytes(usage, self._options.gpu_memory)
        budget = gpu_budget(usage, wanted_nbytes, self._moves.nbytes, elsewhere_nbytes, self._pool_nbytes)
        nbytes, lasting_nbytes = self._agree(
            "GPU memory",
            (budget.nbytes, budget.lasting_nbytes),
            lambda ranks: [min(sizes) for sizes in zip(*ranks, strict=True)],
        )
        reason = budget.reason if nbytes == budget.nbytes else "what the rank with the least has free"
        return GpuBudget(nbytes, lasting_nbytes, reason)

    def _chunks(self, shards: Sequence[Shard]) -> list[list[StateChunk]]:
        """Chunks of each sub-group whose state may be there."""
        groups: list[list[StateChunk]] = []
        index_of = {shard.key: index for index, shard in enumerate(shards)}
        for index in range(self._n_sub_groups):
            groups.append([])
            if not self._moves.may_move(index):
                continue
            for chunk, keys in zip(self._tier.chunks(index), self._moves.weights_of(index), strict=True):
                weights = tuple(index_of[key] for key in keys if key in index_of)
                groups[-1].append(StateChunk(chunk.nbytes, chunk.numel, weights))
        return groups

    def _weight(self, shard: Shard, seconds: float) -> Weight:
        return Weight(
            shard.nbytes, seconds, shard.nbytes if shard.frees_host else 0, self._moves.gradient_nbytes_of(shard.key)
        )

    def _costs(
        self,
        typical: StepTimes,
        shards: Sequence[Shard],
        chunks: Sequence[Sequence[StateChunk]],
        moved: Mapping[int, MoveCost],
    ) -> StepCosts:
        """In a typical step, by the records of the last observed one. A weight's wait is at most its own copies' time,
        with that of the host where modules whose weights are there run without a fetch: the rest was for earlier ones.
        The host's time with a weight on NVMe is the time of its reads."""
        waits, share = self._observer.waits(), self._observer.typical_share
        rate = self._memory.copy_rate()
        weights = []
        for shard in shards:
            wait, seconds = waits.get(shard.key), 0.0
            if wait is not None:
                copies = wait.fetches * shard.nbytes / rate
                longest = wait.seconds if shard.stored else copies + self._without_fetches * wait.host_seconds
                overhead = wait.overhead_seconds if shard.stored or self._without_fetches else 0.0
                seconds = max((min(wait.seconds, longest) + overhead) * share, HIDDEN_SHARE * copies)
            weights.append(self._weight(shard, seconds))
        activations = {}
        for position, cost in moved.items():
            copies = 2 * cost.moved_nbytes / rate
            seconds = min(cost.seconds, copies) if cost.in_host else cost.seconds
            seconds = max(seconds * share, HIDDEN_SHARE * copies)
            activations[position] = SavedItem(cost.nbytes, seconds, cost.nbytes if cost.in_host else 0)
        numel = self._numel_outside(chunks, self._moves.counts())
        stored = sum(
            chunk.nbytes
            for index in range(self._n_sub_groups)
            for chunk, place in zip(self._tier.chunks(index), self._tier.places(index), strict=True)
            if place is Place.NVME
        )
        rates = UpdateRates(
            max(numel, 1) / max(typical.arithmetic, 1e-6),
            nvme_bytes_per_s(stored, typical.update, typical.without_update, self._staging_nbytes()),
            self._tier.resident_nbytes + max(self._host_left_nbytes(), 0),
            rate,
            self._hidden_share(),
            typical.forward,
        )
        return StepCosts(weights, rates, activations)

    @staticmethod
    def _numel_outside(chunks: Sequence[Sequence[StateChunk]], there: Sequence[int]) -> int:
        """Parameters of the state that is not there."""
        return sum(chunk.numel for group, count in zip(chunks, there, strict=True) for chunk in group[count:])

    def _carry_out(
        self,
        plan: GpuPlan,
        costs: StepCosts,
        shards: Sequence[Shard],
        chunks: Sequence[Sequence[StateChunk]],
        budget: GpuBudget,
    ) -> GpuPlan:
        """All ranks move the weights that the first one has chosen, and each its own state and activations beside
        them; returns the plan that this has come to."""
        wanted = [shard.key for shard, goes in zip(shards, plan.weights, strict=True) if goes]
        chosen = set(self._agree("which weights go to GPU memory", wanted, lambda choices: choices[0]))
        moving = [shard for shard in shards if shard.key in chosen]
        if not self._moves.bring_weights(moving, self._agree):
            return plan
        if chosen != set(wanted):  # as many chunks as fit beside these weights, with their gradients
            taken = self._moves.weight_nbytes + sum(self._moves.gradient_nbytes_of(key) for key in chosen)
            free = [[dataclasses.replace(chunk, weights=()) for chunk in group] for group in chunks]
            left_nbytes, lasting_nbytes = max(budget.nbytes - taken, 0), max(budget.lasting_nbytes - taken, 0)
            plan = dataclasses.replace(costs, weights=[]).plan(free, left_nbytes, lasting_nbytes)
        counts = [max(count, there) for count, there in zip(plan.chunks, self._moves.counts(), strict=True)]
        self._moves.bring_state(counts)
        return plan

    @property
    def _moves_activations(self) -> bool:
        return self._activations is not None and self._activations.moves_some

    # Passes

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._t_forward_s, self._waited_before_s = time.perf_counter(), self._update_waits()

    def begin_backward(self) -> None:
        """A backward pass begins."""
        if self._forward_seconds is None:
            waited_s = self._update_waits() - self._waited_before_s
            self._forward_seconds = time.perf_counter() - self._t_forward_s - waited_s

    # Giving back

    def _give_back(self, nbytes: int) -> None:
        """State leaves, and weights where that is not enough."""
        left_nbytes = n_weights = 0
        try:
            if self._moves.state_nbytes:
                left_nbytes = self._moves.release_state(nbytes + int(QUANTUM_SHARE * self._watch.headroom_nbytes))
            if left_nbytes < nbytes and self._moves.weight_nbytes:
                n_weights = self._moves.release_weights()
            self._moves.release_gradients()
        except TenCacheError as error:
            self._stuck = True
            logger.warning("training needs GPU memory, but its contents fit nowhere else: %s", error)
        self._left_nbytes += left_nbytes
        if n_weights:
            logger.warning("training needs GPU memory: %d weights left it", n_weights)
        if left_nbytes or n_weights:
            self._watch.released()

    # On request

    def hand_back(self, *, state: bool = True, weights: bool = True) -> int:
        """State with its gradients, or weights, leave GPU memory until :meth:`take_again`; returns their bytes. Between
        two micro-steps, on all ranks.

        Raises:
            MemoryLimitError, StorageError: they have nowhere to go.
        """
        self._agree("that GPU memory is handed back", True, all)
        moves, before = self._moves, self._moves.nbytes
        chunks, keys = self._handed_back or (moves.counts(), frozenset(moves.weights_there))
        self._handed_back = chunks, keys
        if state:
            moves.release_state(moves.state_nbytes)
            moves.release_gradients()
        if weights:
            moves.release_weights(on_all_ranks=True)
        logger.info("%s of GPU memory handed back", gib(before - moves.nbytes))
        return before - moves.nbytes

    def take_again(self) -> None:
        """What was handed back goes there again, as far as there is room. Idempotent."""
        if self._handed_back is None:
            return
        (chunks, keys), self._handed_back = self._handed_back, None
        moving = [shard for shard in self._shards() if shard.key in keys]
        if self._moves.bring_weights(moving, self._agree):  # also without any: other ranks may have some
            self._moves.bring_state(chunks)
        self._memory.synchronize()
        self._memory.trim()
        self._moves.note()
        self._memory.record()
        logger.info("%s of GPU memory in use again", gib(self._moves.nbytes))

    # Reporting and lifetime

    def _report(self, reason: str, predicted_seconds: float | None, moved_in_s: float | None) -> None:
        self._moves.note()
        moved = "" if moved_in_s is None else f"; moved in {moved_in_s:.1f} s"
        state_nbytes = self._moves.state_nbytes + self._moves.momentum_nbytes
        self._say(
            f"per rank {gib(self._moves.weight_nbytes)} of weights, {gib(self._moves.gradient_nbytes)} of gradients "
            f"and {gib(state_nbytes)} of optimizer state are in GPU memory from now on ({reason}{moved})",
            predicted_seconds,
        )

    def close(self) -> None:
        """Gives the weights back to their model, where they were. Idempotent; the tiers are closed by their owner."""
        self._observer.close()
        self._moves.close()
