# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Muon (``MuonWithAuxAdam``) with offloaded state.

[Note: Muon] Muon replaces the gradient of a matrix by its orthogonalized momentum; what is left of the step is a
multiple of that, and weight decay, on each element. So a step has two parts. After the last backward pass, and before
norms are taken, matrices are orthogonalized one by one on the compute device: gradient and momentum come from host
memory and go back there, the gradient now being the update. Then master weights follow, chunk by chunk, as with any
other optimizer. Parameters that are no matrices, and embeddings, have DeepSpeed's CPU Adam.

On several ranks each matrix has one that orthogonalizes it: the others send it their shards, and get those of the
result. Stock CPU offload gathers all matrices of a sub-group at once, and each rank orthogonalizes all of them; the
results are the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.nn import functional

from tencache_ds.errors import built
from tencache_ds.host_path import LaunchGraphs
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.integration.background_save import Visit
from tencache_ds.observability.spans import Category, span
from tencache_ds.tensors import empty
from tencache_ds.tiers.gradients import GradientMemory, GradientTier
from tencache_ds.tiers.kinds import MOMENTUM

MOST_TURNS = 2
"""Turns whose matrices are on the compute device, beside the one that is being copied there."""

PIECE_NUMEL = 2**24
"""Elements of momentum that a checkpoint takes at a time."""


class Momentum:
    """Momentum of Muon's matrices: a flat tensor for each of their sub-groups, in host memory. Used by the training
    thread.

    Args:
        optimizer: in whose ``state`` it is shown once there is any.
        placeholders: of each sub-group, the tensor by which the optimizer knows it.
        groups: the parameters of each sub-group.
        uses_muon: of each sub-group, whether it has momentum.
        dtype: of momentum.
        memory: of the host.

    Raises:
        MemoryLimitError: there is not enough of it.
    """

    def __init__(
        self,
        optimizer: Any,
        placeholders: Sequence[torch.Tensor],
        groups: Sequence[Sequence[Any]],
        uses_muon: Sequence[bool],
        dtype: torch.dtype,
        memory: GradientMemory,
    ) -> None:
        self._optimizer = optimizer
        self._placeholders = placeholders
        self._flat: dict[int, torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}
        for index, group in enumerate(groups):
            if not uses_muon[index]:
                continue
            numels = [param.partition_numel() for param in group]
            self._flat[index] = memory.take(sum(numels), dtype)
            parts = self._flat[index].split(numels)
            self._parts |= {param.ds_id: part for param, part in zip(group, parts, strict=True)}

    def part(self, key: int) -> torch.Tensor:
        """A matrix's momentum on this rank: 1-D, of its partition's length."""
        return self._parts[key]

    def begun(self, sub_group: int) -> bool:
        """Whether a sub-group has any, after an update."""
        return sub_group in self._flat and MOMENTUM in self._optimizer.state.get(self._placeholders[sub_group], {})

    def flat(self, sub_group: int) -> torch.Tensor:
        """That of a sub-group's matrices on this rank: 1-D."""
        return self._flat[sub_group]

    def scan(self, visit: Visit) -> None:
        """Shows all of it once."""
        for index, flat in self._flat.items():
            for piece in flat.split(PIECE_NUMEL):
                visit(index, {MOMENTUM: piece})

    def show(self) -> None:
        """Puts it into ``optimizer.state``, after an update."""
        for index, flat in self._flat.items():
            self._optimizer.state[self._placeholders[index]][MOMENTUM] = flat

    def replace(self, sub_group: int) -> None:
        """Takes what a load has put into ``optimizer.state``; zero where that has nothing."""
        flat = self._flat.get(sub_group)
        if flat is None:
            return
        state = self._optimizer.state.get(self._placeholders[sub_group], {})
        if MOMENTUM in state:
            flat.copy_(state[MOMENTUM].detach().view(-1))
            state[MOMENTUM] = flat
        else:
            flat.zero_()


class MuonMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's methods for :class:`TenCacheZeroOptimizer_Stage3`."""

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
        copies, graphs = self._copies, self._graphs
        with span(Category.UPDATE, "update::muon"), graphs.step():
            staged = [self._staged(turn, copies) for turn in turns[:1]]
            for turn, following in zip(turns, [*turns[1:], None], strict=True):
                shards = copies.arrived(*staged.pop())
                if following is not None:
                    staged.append(self._staged(following, copies))
                norms |= self._orthogonalize(turn, shards, copies, graphs)
            if norms:
                values = torch.stack(list(norms.values())).cpu()
                self.norm_for_param_grads.update(zip(norms, values.unbind(), strict=True))
            get_accelerator().synchronize()  # the host reads what was copied there
        self._momentum.show()

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
        sources = [(gradients.contents(p.ds_id), momentum.part(p.ds_id)) for p in turn.params]
        return copies.to_device(sources, gradients.dtype)

    def _orthogonalize(
        self, turn: _Turn, shards: list[torch.Tensor], copies: _Copies, graphs: LaunchGraphs
    ) -> dict[Any, torch.Tensor]:
        """Orthogonalizes the matrices of a turn; returns the norm of each one's update on this rank, on the compute
        device.

        Args:
            turn: whose.
            shards: this rank's of gradient and momentum, ``(2, elements)`` of each matrix.
            copies: take the results to the host.
            graphs: launch the kernels.
        """
        gradients, momentum = built(self._gradients), built(self._momentum)
        loss_scale = float(self.loss_scale)
        whole = _exchanged(shards, turn.ranks)
        if whole is not None:
            matrix = _Matrix.of(turn.params[dist.get_rank(group=turn.ranks)], turn.hyper)
            if loss_scale != 1.0:
                whole[:, 0].div_(loss_scale)
            graphs.run((matrix, whole.shape, whole.dtype), matrix.orthogonalize, whole)
        results = _returned(whole, shards, turn.ranks)
        updates = [both[0] * loss_scale if loss_scale != 1.0 else both[0] for both in results]
        with copies.to_host([*results, *updates]):
            for param, update, both in zip(turn.params, updates, results, strict=True):
                gradients.overwrite(param.ds_id, update)
                momentum.part(param.ds_id).copy_(both[1], non_blocking=True)
        norms = (update.to(calls.norm_dtype()).norm(2) for update in updates)
        return dict(zip(map(self.get_param_id, turn.params), norms, strict=True))


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
        for kind, values in enumerate((update, momentum)):
            padding = whole[:, kind].numel() - numel
            # A copy, also where nothing is added: on one rank momentum is a view of where it goes.
            padded = functional.pad(values.reshape(-1), (0, padding))
            whole[:, kind].copy_(padded.view(whole.shape[0], -1))


class _Copies:
    """Copies to and from the compute device on streams of their own, where it works beside the host: the same ones in
    every step, since torch keeps memory for each."""

    def __init__(self) -> None:
        accelerator: Any = get_accelerator()
        self._beside = not accelerator.is_synchronized_device()
        self._ended: deque[Any] = deque()  # an event for each turn
        if self._beside:
            self._up, self._down = accelerator.Stream(), accelerator.Stream()

    def to_device(
        self, sources: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], Any]:
        """Begins to copy tensors of one length each, as the rows of one; not before all turns but the last two have
        ended, which bounds the memory they take.

        Returns:
            What :meth:`arrived` takes.
        """
        accelerator: Any = get_accelerator()
        device = accelerator.current_device_name()
        while len(self._ended) > MOST_TURNS:
            self._ended.popleft().synchronize()
        with accelerator.stream(self._up) if self._beside else contextlib.nullcontext():
            rows = [empty(len(each) * each[0].numel(), dtype, device).view(len(each), -1) for each in sources]
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
    def to_host(self, sources: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the copies of tensors of the current stream; a turn ends with them."""
        if not self._beside:
            yield
            return
        accelerator: Any = get_accelerator()
        self._down.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._down):
            yield
            for each in sources:
                each.record_stream(self._down)
            event = accelerator.Event()
            event.record()
        self._ended.append(event)


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
