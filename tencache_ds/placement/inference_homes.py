# SPDX-License-Identifier: Apache-2.0
"""The weights of a DeepSpeed engine without optimizer in GPU memory: chosen after the first forward pass, released when
a pass or the cache of keys and values needs the memory, and brought back when they do not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import TenCacheError
from tencache_ds.layout import gib
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.placement.gpu_policy import limit_nbytes
from tencache_ds.placement.inference_policy import PassMemory, choose_weights
from tencache_ds.placement.moves import Agree, Shard, WeightMoves

logger = logging.getLogger("DeepSpeed.tencache")


class InferenceHomes:
    """Used by the thread that computes.

    Args:
        options: of the user.
        memory: of the compute device.
        shards: the weights that may be there, in the order of their use, which is the same on every rank.
        moves: carries out what is decided.
        before_moves: called before weights move between two passes.
        after_moves: called when weights have moved.
        idle: of a weight whether it could leave now: no module uses it and no gather reads it.
        returns_alone: of a weight whether it can leave, and come back, without the other ranks noticing.
        most_gathered_nbytes: the most bytes of weights that a pass holds gathered at a time, besides those that live in
            GPU memory; the argument: if all weights lived there that can.
        gathered_nbytes: of weights that are gathered at present, in a pass.
        beside_others: whether the process has another DeepSpeed engine. Unless the user has set ``gpu_memory``, weights
            keep out of GPU memory then: nothing tells what the other one's next pass is going to need.
        agree: among all ranks.
        say: tells the user, on one rank.
    """

    def __init__(
        self,
        options: TenCacheConfig,
        memory: DeviceMemory,
        shards: Callable[[], Sequence[Shard]],
        moves: WeightMoves,
        *,
        before_moves: Callable[[], None],
        after_moves: Callable[[], None],
        idle: Callable[[int], bool],
        returns_alone: Callable[[int], bool],
        most_gathered_nbytes: Callable[[bool], int],
        gathered_nbytes: Callable[[], int],
        beside_others: Callable[[], bool],
        agree: Agree,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._memory = memory
        self._shards = shards
        self._moves = moves
        self._before_moves = before_moves
        self._after_moves = after_moves
        self._idle = idle
        self._returns_alone = returns_alone
        self._most_gathered_nbytes = most_gathered_nbytes
        self._gathered_nbytes = gathered_nbytes
        self._beside_others = beside_others
        self._agree = agree
        self._say = say
        self._watch = PassMemory()
        self._planned = self._stuck = False
        self._t_next_look_s = 0.0
        self._left_nbytes = 0
        self._said = False
        self._n_passes = 0  # before the plan
        self._handed_back: frozenset[int] | None = None  # weights (keys)
        memory.record()

    @property
    def planned(self) -> bool:
        """Whether weights have been chosen."""
        return self._planned

    def begin_pass(self, tokens: int) -> None:
        """A forward pass begins, whose input has so many elements (0: not known)."""
        t_start_s = time.monotonic()
        short_nbytes = self._watch.begin_pass(self._memory.usage(), tokens, self._most_gathered_nbytes(False))
        self._looked(t_start_s)
        if self._moves.there and self._keeps_out():
            short_nbytes = self._moves.nbytes
        if self._planned and short_nbytes > 0:
            self._release(short_nbytes)

    def relieve(self) -> None:
        """Called between modules: releases weights where the pass is about to need their memory."""
        gathered_nbytes = self._gathered_nbytes()
        self._watch.gathered(gathered_nbytes)
        t_start_s = time.monotonic()
        if t_start_s < self._t_next_look_s:
            return
        short_nbytes = self._watch.look(self._memory.usage(), gathered_nbytes)
        self._looked(t_start_s)
        if self._planned and short_nbytes > 0:
            self._release(short_nbytes)

    def pass_done(self) -> None:
        """A forward pass is over."""
        spare_nbytes = self._watch.end_pass(self._memory.usage())
        self._t_next_look_s = 0.0  # modules may be called outside a pass of the whole model
        if self._handed_back is not None:
            return
        if not self._planned:
            self._n_passes += 1
            # All ranks have to agree, also about what each sees for itself: less and less often, by a common count.
            if self._n_passes.bit_count() == 1:
                self._plan()
            return
        if self._left_nbytes:
            logger.warning(
                "a forward pass needed GPU memory: %s of weights left it, %s are still there",
                gib(self._left_nbytes),
                gib(self._moves.nbytes),
            )
            self._left_nbytes = 0
        elif spare_nbytes > 0 and self._moves.out and not self._keeps_out() and all(map(self._idle, self._moves.out)):
            self._before_moves()
            if self._moves.bring_back(spare_nbytes):
                self._watch.came_back()
                self._stuck = False
                self._moved()

    def _keeps_out(self) -> bool:
        return self._options.gpu_memory is None and self._beside_others()

    def _plan(self) -> None:
        """After the first pass, by what it took; after a later one, where weights are gathered or have to keep out."""
        self._before_moves()
        shards = self._shards()
        keeps_out = self._keeps_out()
        if keeps_out and not self._said:
            self._said = True
            self._say(
                "no weights of the engine without an optimizer go to GPU memory beside another engine of this process; "
                'its "tencache.gpu_memory" gives it a part'
            )
        movable = not keeps_out and all(self._idle(shard.key) for shard in shards)
        if not self._agree("whether weights can move", movable, all):
            return
        self._planned = True
        self._memory.synchronize()
        usage = self._memory.usage()
        # Where all weights fit, fewer have to be gathered in each pass, and less has to stay free for that.
        headroom_nbytes = self._watch.headroom_beside(self._most_gathered_nbytes(True))
        if usage.available_nbytes - headroom_nbytes < sum(shard.nbytes for shard in shards):
            headroom_nbytes = self._watch.headroom_nbytes
        left_nbytes = max(usage.available_nbytes - headroom_nbytes, 0)
        reason = f"a pass left {gib(usage.available_nbytes)} free, {gib(headroom_nbytes)} stay free"
        wanted_nbytes = limit_nbytes(usage, self._options.gpu_memory)
        if wanted_nbytes is not None and wanted_nbytes <= left_nbytes:
            left_nbytes, reason = wanted_nbytes, "tencache.gpu_memory"
        budget_nbytes = self._agree("GPU memory", left_nbytes, min)
        if budget_nbytes < left_nbytes:
            reason = "what the rank with the least has free"
        nbytes, stored = [shard.nbytes for shard in shards], [shard.stored for shard in shards]
        chosen = [shards[index] for index in choose_weights(nbytes, stored, budget_nbytes)]
        t_start_s = time.perf_counter()
        if not chosen or not self._moves.bring(chosen, self._agree):
            return
        self._moved()
        there = set(self._moves.there)
        left = [shard for shard in shards if shard.key not in there]
        on_nvme = sum(shard.nbytes for shard in left if shard.stored)
        in_ram = sum(shard.nbytes for shard in left) - on_nvme
        rest = [f"{gib(size)} {place}" for size, place in ((in_ram, "in RAM"), (on_nvme, "on NVMe")) if size]
        self._say(
            f"per rank {gib(self._moves.nbytes)} of weights are in GPU memory from now on"
            f"{', ' + ' and '.join(rest) + ' as before' if rest else ', which is all of them'} "
            f"({reason}; moved in {time.perf_counter() - t_start_s:.1f} s)"
        )

    def hand_back(self, *, state: bool = True, weights: bool = True) -> int:
        """All weights leave GPU memory until :meth:`take_again`; returns their bytes. Between two passes, on all ranks.

        Args:
            state: there is none.
            weights: whether they do.

        Raises:
            MemoryLimitError, StorageError: they have nowhere to go.
        """
        self._agree("that GPU memory is handed back", True, all)
        self._handed_back = self._handed_back or frozenset(self._moves.there)
        nbytes = self._moves.nbytes
        if weights:
            self._before_moves()
            self._memory.synchronize()
            for key in reversed(list(self._moves.there)):
                self._moves.release(key)
            self._moved()
        return nbytes - self._moves.nbytes

    def take_again(self) -> None:
        """What was handed back goes there again, if there is room. Idempotent."""
        if self._handed_back is None:
            return
        keys, self._handed_back = self._handed_back, None
        self._before_moves()
        moving = [shard for shard in self._shards() if shard.key in keys]
        self._moves.bring(moving, self._agree)  # also without any: other ranks may have some
        self._moved()

    def _looked(self, t_start_s: float) -> None:
        now_s = time.monotonic()
        self._t_next_look_s = now_s + self._watch.pause_s(now_s - t_start_s)

    def _release(self, nbytes: int) -> None:
        """Weights leave, the least useful first, until so much is free or none that may leave is there."""
        if self._stuck:
            return
        released = 0
        leaving = [key for key in reversed(list(self._moves.there)) if self._returns_alone(key) and self._idle(key)]
        if leaving:
            self._memory.synchronize()
        try:
            for key in leaving:
                if released >= nbytes:
                    break
                released += self._moves.release(key)
        except TenCacheError as error:
            self._stuck = True
            logger.warning("a forward pass needs GPU memory, but the weights in it fit nowhere else: %s", error)
        if released:
            self._watch.released(released)
            self._left_nbytes += released
            self._memory.trim()
            self._after_moves()

    def _moved(self) -> None:
        self._memory.synchronize()
        self._memory.trim()
        self._after_moves()

    def close(self) -> None:
        """Gives the weights back to their model, where they were. Idempotent."""
        self._memory.synchronize()
        self._moves.close()
        self._after_moves()
