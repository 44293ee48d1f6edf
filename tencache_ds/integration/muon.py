# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Muon (``MuonWithAuxAdam``) with offloaded state.

[Note: Muon] Muon replaces the gradient of a matrix by its orthogonalized momentum; what is left of the step is a
multiple of that, and weight decay, on each element. So a step has two parts. After the last backward pass, and before
norms are taken, matrices are orthogonalized one by one on the compute device: gradient and momentum come from host
memory, or momentum from NVMe, and go back there, the gradient now being the update. Then master weights follow, chunk
by chunk, as with any other optimizer. Parameters that are no matrices, and embeddings, have DeepSpeed's CPU Adam.

On several ranks each matrix has one that orthogonalizes it: the others send it their shards, and get those of the
result. Stock CPU offload gathers all matrices of a sub-group at once, and each rank orthogonalizes all of them; the
results are the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.nn import functional

from tencache_ds.errors import built
from tencache_ds.host_path import LaunchGraphs
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.observability.counters import Link
from tencache_ds.observability.spans import Category, span
from tencache_ds.runtime.session import Session
from tencache_ds.tensors import empty
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.momentum import Momentum

MOST_TURNS = 2
"""Turns whose matrices are on the compute device, beside the one that is being copied there."""

BUFFERED_TURNS = MOST_TURNS + 4
"""Turns whose momentum is in buffers where it is on NVMe: these, the one under way, the next, and two that are being
read or written."""

_Result = TypeVar("_Result")


class MuonMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's methods for :class:`TenCacheZeroOptimizer_Stage3`."""

    tencache: Session | None = None
    _gradients: GradientTier | None = None
    _momentum: Momentum | None = None
    _graphs: LaunchGraphs | None = None
    _copies: _Copies | None = None

    @torch.no_grad()
    def _apply_muon_updates_cpu_offload(self) -> None:
        """Turns the accumulated gradients of Muon's matrices into their updates; see [Note: Muon]."""
        if self._momentum is None:
            super()._apply_muon_updates_cpu_offload()
            return
        self.step_guard.begin_change()  # gradients and momentum
        norms: dict[Any, torch.Tensor] = {}
        turns = self._turns()
        if self._copies is None or self._graphs is None:
            self._copies, self._graphs = _Copies(), LaunchGraphs(enabled=self.host_path.graphs)
        copies, graphs, momentum = self._copies, self._graphs, self._momentum
        order = [key for turn in turns for key in turn.keys]
        together = self.step_guard.together("the orthogonalization of matrices")
        with (
            span(Category.UPDATE, "update::muon"),
            graphs.step(),
            together,
            momentum.updating(order, get_accelerator().synchronize),
            copies.turns(),
        ):
            own = _OwnErrors(raises_at_once=dist.get_world_size() == 1)
            ahead = own.attempt(partial(self._staged, turns[0], copies)) if turns else None
            for turn, following in zip(turns, [*turns[1:], None], strict=True):
                shards = self._nothing(turn) if ahead is None else copies.arrived(*ahead)
                ahead = None if following is None else own.attempt(partial(self._staged, following, copies))
                whole = _exchanged(shards, turn.ranks)
                if whole is not None:
                    own.attempt(partial(self._orthogonalize, turn, whole, graphs))
                results = _returned(whole, shards, turn.ranks)
                norms |= own.attempt(partial(self._finish, turn, results, copies)) or {}
            own.raise_first()
            if norms:
                values = torch.stack(list(norms.values())).cpu()
                self.norm_for_param_grads.update(zip(norms, values.unbind(), strict=True))
            copies.end_turns(0)  # the host reads what was copied there

    def _turns(self) -> list[_Turn]:
        turns = []
        for index, group in enumerate(self.fp16_groups):
            if self.sub_groups_using_muon[index] and group:
                hyper = self.optimizer.param_groups[self.sub_group_to_group_id[index]]
                ranks = self._get_sub_group_process_group(index)
                n_ranks = dist.get_world_size(group=ranks)
                turns += [_Turn(group[i : i + n_ranks], hyper, ranks) for i in range(0, len(group), n_ranks)]
        return turns

    def _staged(self, turn: _Turn, copies: _Copies) -> tuple[list[torch.Tensor], Any]:
        """This rank's shards of gradients and momentum on their way to the compute device."""
        gradients, momentum = built(self._gradients), built(self._momentum)
        copies.end_turns(MOST_TURNS)
        sources = [(gradients.contents(key), momentum.take(key)) for key in turn.keys]
        self._moved(Link.H2D, turn)
        return copies.to_device(sources, gradients.dtype)

    def _moved(self, link: Link, turn: _Turn) -> None:
        """Counts what a turn moves between host memory and the compute device, in one direction."""
        gradients, momentum = built(self._gradients), built(self._momentum)
        for key in turn.keys:
            gradient_nbytes = 0 if gradients.on_device(key) else gradients.nbytes_of(key)
            momentum_nbytes = 0 if momentum.on_device(key) else momentum.nbytes_of(key)
            built(self.tencache).counters.moved(link, gradient_nbytes + momentum_nbytes)

    def _nothing(self, turn: _Turn) -> list[torch.Tensor]:
        """Shards with any values, in place of those that :meth:`_staged` could not get."""
        dtype = built(self._gradients).dtype
        return [_shard(param.partition_numel(), dtype) for param in turn.params]

    def _orthogonalize(self, turn: _Turn, whole: torch.Tensor, graphs: LaunchGraphs) -> None:
        """Orthogonalizes the matrix that is this rank's turn.

        Args:
            turn: whose.
            whole: all ranks' shards of its gradient and momentum: ``(rank, 2, elements)``.
            graphs: launch the kernels.
        """
        loss_scale = float(self.loss_scale)
        matrix = _Matrix.of(turn.params[dist.get_rank(group=turn.ranks)], turn.hyper)
        if loss_scale != 1.0:
            whole[:, 0].div_(loss_scale)
        graphs.run((matrix, whole.shape, whole.dtype), matrix.orthogonalize, whole)

    def _finish(self, turn: _Turn, results: Sequence[torch.Tensor], copies: _Copies) -> dict[Any, torch.Tensor]:
        """Takes this rank's shards of updates and momentum to the host; returns the norm of each update, on the compute
        device.

        Args:
            turn: whose.
            results: of each matrix, ``(2, elements)``.
            copies: take them there.
        """
        gradients, momentum = built(self._gradients), built(self._momentum)
        loss_scale = float(self.loss_scale)
        updates = [both[0] * loss_scale if loss_scale != 1.0 else both[0] for both in results]
        with copies.to_host([*results, *updates], partial(momentum.put, turn.keys)):
            for key, update, both in zip(turn.keys, updates, results, strict=True):
                gradients.overwrite(key, update)
                momentum.taken(key).copy_(both[1], non_blocking=True)
            self._moved(Link.D2H, turn)
        norms = (update.to(calls.norm_dtype()).norm(2) for update in updates)
        return dict(zip(map(self.get_param_id, turn.params), norms, strict=True))


class _OwnErrors:
    """Keeps the first error of this rank between collectives until all are over: no rank waits in one for another that
    has failed.

    Args:
        raises_at_once: there are no other ranks.
    """

    def __init__(self, *, raises_at_once: bool) -> None:
        self._raises_at_once = raises_at_once
        self._first: Exception | None = None

    def attempt(self, part: Callable[[], _Result]) -> _Result | None:
        """What a part between collectives returns; None after an error, its own or an earlier one."""
        if self._first is None:
            try:
                return part()
            except Exception as error:
                if self._raises_at_once:
                    raise
                self._first = error
        return None

    def raise_first(self) -> None:
        """Raises the error, if there is one."""
        if self._first is not None:
            raise self._first


@dataclass(frozen=True, slots=True)
class _Turn:
    """Matrices that are orthogonalized at a time, each on one rank.

    Attributes:
        params: one per rank, the first rank's first, or fewer.
        hyper: their hyper-parameters.
        ranks: process group among which they are partitioned.
    """

    params: Sequence[Any]
    hyper: Mapping[str, Any]
    ranks: Any

    @property
    def keys(self) -> list[int]:
        """Of the parameters."""
        return [param.ds_id for param in self.params]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What the orthogonalization of a matrix depends on, beside its values.

    Attributes:
        shape: of the matrix.
        options: of DeepSpeed's function.
    """

    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, param: Any, hyper: Mapping[str, Any]) -> _Matrix:
        """That of a parameter of a group with these hyper-parameters."""
        options = {
            "beta": hyper["momentum"],
            "ns_method": hyper.get("ns_method", "gram"),
            "is_expert_group": getattr(param, "is_expert_group", False),
            "num_heads": getattr(param, "muon_num_heads", None),
        }
        return cls(tuple(param.ds_shape), tuple(options.items()))

    def orthogonalize(self, whole: torch.Tensor) -> None:
        """Replaces gradient and momentum by update and momentum.

        Args:
            whole: the ranks' shards of both, padded to one length: ``(rank, 2, elements)``.
        """
        from deepspeed.runtime.zero.muon.original_muon import muon_update

        numel = math.prod(self.shape)
        gradient, momentum = (whole[:, kind].reshape(-1)[:numel].view(self.shape) for kind in (0, 1))
        update = muon_update(gradient, momentum, **dict(self.options))
        for target, values in ((whole[:, 0], update), (whole[:, 1], momentum)):
            if values.data_ptr() != target.data_ptr():  # on one rank momentum is there already
                flat, padding = values.reshape(-1), target.numel() - numel
                target.copy_((functional.pad(flat, (0, padding)) if padding else flat).view(target.shape))


class _Copies:
    """Copies to and from the compute device on streams of their own, where it works beside the host: the same ones in
    every step, since torch keeps memory for each."""

    def __init__(self) -> None:
        accelerator: Any = get_accelerator()
        self._beside = not accelerator.is_synchronized_device()
        self._ending: deque[tuple[Any, Callable[[], None]]] = deque()  # of each turn an event, and what follows
        if self._beside:
            self._up, self._down = accelerator.Stream(), accelerator.Stream()

    @contextlib.contextmanager
    def turns(self) -> Iterator[None]:
        """Around the turns of a step: after an error nothing follows those that have not ended."""
        try:
            yield
        finally:
            self._ending.clear()

    def to_device(
        self, sources: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], Any]:
        """Begins to copy pairs of tensors of one length, each as the rows of one.

        Returns:
            What :meth:`arrived` takes.
        """
        accelerator: Any = get_accelerator()
        with accelerator.stream(self._up) if self._beside else contextlib.nullcontext():
            rows = [_shard(first.numel(), dtype) for first, _ in sources]
            for each, target in zip(sources, rows, strict=True):
                for source, row in zip(each, target, strict=True):
                    row.copy_(source, non_blocking=True)
            event = None
            if self._beside:
                event = accelerator.Event()
                event.record()
        return rows, event

    def arrived(self, rows: list[torch.Tensor], event: Any) -> list[torch.Tensor]:
        """The copies, for the current stream."""
        if self._beside:
            stream = get_accelerator().current_stream()
            stream.wait_event(event)
            for each in rows:
                each.record_stream(stream)
        return rows

    @contextlib.contextmanager
    def to_host(self, sources: Sequence[torch.Tensor], then: Callable[[], None]) -> Iterator[None]:
        """Around the copies of tensors of the current stream; a turn ends with them.

        Args:
            sources: the tensors.
            then: called by :meth:`end_turns` when they are done.
        """
        if not self._beside:
            yield
            then()
            return
        accelerator: Any = get_accelerator()
        self._down.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._down):
            yield
            for each in sources:
                each.record_stream(self._down)
            event = accelerator.Event()
            event.record()
        self._ending.append((event, then))

    def end_turns(self, most: int) -> None:
        """Waits until no more than this number of turns is under way, which bounds the memory they take."""
        while len(self._ending) > most:
            event, then = self._ending.popleft()
            event.synchronize()
            then()


def _shard(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory on the compute device for gradient and momentum of a shard: ``(2, numel)``."""
    return empty(2 * numel, dtype, get_accelerator().current_device_name()).view(2, -1)


def _exchanged(shards: Sequence[torch.Tensor], ranks: Any) -> torch.Tensor | None:
    """All ranks' shards of the matrix that is this rank's turn; None if there are fewer matrices. Collective.

    Args:
        shards: this rank's of each matrix, that of the first rank first: ``(2, elements)``, contiguous.
        ranks: process group.

    Returns:
        ``(rank, 2, elements)``.
    """
    n_ranks, rank = dist.get_world_size(group=ranks), dist.get_rank(group=ranks)
    own = shards[rank] if rank < len(shards) else None
    if n_ranks == 1:
        return None if own is None else own.unsqueeze(0)
    received = 0 if own is None else own.nbytes
    target = empty(n_ranks * received, torch.uint8, shards[0].device)
    source = torch.cat([_bytes(shard) for shard in shards])
    dist.all_to_all_single(target, source, [received] * n_ranks, _sizes(shards, n_ranks), group=ranks)
    return None if own is None else target.view(own.dtype).view(n_ranks, *own.shape)


def _returned(whole: torch.Tensor | None, shards: Sequence[torch.Tensor], ranks: Any) -> list[torch.Tensor]:
    """This rank's shard of each matrix, from the ranks that have them. Collective.

    Args:
        whole: as from :func:`_exchanged`.
        shards: of the same shapes and dtype.
        ranks: process group.
    """
    n_ranks = dist.get_world_size(group=ranks)
    if n_ranks == 1:
        return [] if whole is None else [whole[0]]
    source = empty(0, torch.uint8, shards[0].device) if whole is None else _bytes(whole)
    sizes = _sizes(shards, n_ranks)
    target = empty(sum(sizes), torch.uint8, shards[0].device)
    dist.all_to_all_single(target, source, sizes, [source.numel() // n_ranks] * n_ranks, group=ranks)
    parts = target.split(sizes[: len(shards)])
    return [part.view(shard.dtype).view(shard.shape) for part, shard in zip(parts, shards, strict=True)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _sizes(shards: Sequence[torch.Tensor], n_ranks: int) -> list[int]:
    """Bytes of each rank's shard."""
    return [shard.nbytes for shard in shards] + [0] * (n_ranks - len(shards))
