# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: where an optimizer reads and writes them (in the weight tier, or in DeepSpeed's flat
buffers), their shards in device memory, and weights that stay gathered there.

Split master weights are rejoined before their weight changes or leaves host memory: see [Note: whose bits a master
weight shares] in :mod:`tencache_ds.tiers.split_master`.

DeepSpeed changes weights in three ways. The optimizer's step writes the chunks itself. Loading a checkpoint replaces
master weights first. Everything else, ``load_state_dict`` too, gathers a weight, changes it and has it partitioned as
updated.

DeepSpeed gathers from ``param.ds_tensor`` on any device. With its memory on the device there is nothing to copy; on one
rank the gathered weight is the shard itself, as in training without offload.

[Note: weights that stay gathered] On one rank the gathered weight is the shard itself, once that is in GPU memory.
DeepSpeed would still release and gather it in every pass, which costs more than a small module's arithmetic. So it is
marked as what DeepSpeed keeps gathered (``ds_persist``) as long as it is there, and modules all of whose weights are
there run without DeepSpeed's hooks (:class:`~tencache_ds.host_path.suspended_hooks.SuspendedHooks`). The optimizer
updates the shard, and so the gathered weight: unlike DeepSpeed's own persistent weights these are not gathered anew
after each step. On several ranks a gathered weight takes memory of its own, and is gathered in each pass from the
shards.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.integration.hooked_modules import modules_wait_for, shard_nbytes
from tencache_ds.integration.param_swapper import ParamSwapper
from tencache_ds.integration.watched_tensors import values_of
from tencache_ds.observability.counters import Counters, Link
from tencache_ds.placement.moves import Shard
from tencache_ds.placement.places import Place
from tencache_ds.planning.chunks import Chunk, Overlap, overlaps
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.weight_homes import Home


def in_tier(param: Any) -> bool:
    """Whether a parameter's shard is in the weight tier, resident or stored."""
    return isinstance(param.nvme_swapper, ParamSwapper) and param.nvme_swapper.manages(param)


def home_in_tier(param: Any) -> Home:
    """The home of a weight whose shard is :func:`in_tier`."""
    home: Home = param.nvme_swapper.engine.weights.homes.of(param.ds_id)
    return home


def cast_shard(param: Any, dtype: torch.dtype) -> None:
    """Gives a partitioned parameter's shard another dtype, to which it is rounded; in the weight tier or beside it."""
    if param.ds_tensor.dtype == dtype:
        return
    if in_tier(param):
        param.nvme_swapper.cast(param, dtype)
        return
    shard = values_of(param)
    cast = shard.to(dtype)
    param.ds_tensor.data = get_accelerator().pin_memory(cast) if shard.is_pinned() else cast


class ModelWeights:
    """Shards of this rank by sub-group; a :class:`~tencache_ds.tiers.update.WeightWriter`. Used by the training
    thread.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Any]],
        flats: Sequence[torch.Tensor | None],
        partitions: Sequence[Sequence[Any]],
        counters: Counters,
        order_gathers: Callable[[], None],
    ) -> None:
        """
        Args:
            groups: the parameters of each sub-group.
            flats: the flat tensor that the shards of a sub-group are views of; None where each has its own memory.
            partitions: the shards of each sub-group, with their lengths.
            counters: where bytes to the device are counted.
            order_gathers: see :meth:`WeightWriter.order_gathers`.
        """
        self._groups = groups
        self._flats = list(flats)
        self._partitions = partitions
        self._counters = counters
        self.order_gathers = order_gathers
        """See :meth:`WeightWriter.order_gathers`."""
        self._found_segments: dict[int, tuple[list[int], list[int]]] = {}
        self._found_overlaps: dict[Chunk, list[Overlap]] = {}

        self._sub_group_of = {param.ds_id: index for index, group in enumerate(groups) for param in group}

    def bfloat16_in_host_memory(
        self, chunk: Chunk, instead: Mapping[int, torch.Tensor]
    ) -> list[tuple[int, torch.Tensor]] | None:
        """``(first element in the chunk, values)`` of the weights that a chunk has elements of, ascending: the memory
        that :meth:`open` gives. None unless all of them are bfloat16 in host memory, and cover the chunk.

        Args:
            chunk: which one.
            instead: shards that are shown in the place of a weight's own.
        """
        pieces, position = [], 0
        for overlap in self._overlaps(chunk):
            param = self._groups[chunk.sub_group][overlap.segment]
            shard = self.shard_in_host_memory(param)
            if shard is None or shard.dtype is not torch.bfloat16 or overlap.in_chunk != position:
                return None
            shard = instead.get(param.ds_id, shard)
            pieces.append((position, shard[overlap.in_segment : overlap.in_segment + overlap.numel]))
            position += overlap.numel
        return pieces if position == chunk.numel else None

    def shard_in_host_memory(self, param: Any) -> torch.Tensor | None:
        """A weight's shard, if the optimizer updates it and it is in host memory between two uses."""
        if param.ds_id not in self._sub_group_of:
            return None
        if in_tier(param):
            return home_in_tier(param).in_host_memory
        return values_of(param) if param.ds_tensor.device.type == "cpu" else None

    def sub_group_of(self, key: int) -> int | None:
        """The sub-group of a weight; None of one that the optimizer does not update."""
        return self._sub_group_of.get(key)

    def part_from_flat(self, param: Any) -> None:
        """A parameter's shard no longer lies in its sub-group's flat tensor: from now on each is found separately."""
        sub_group = self._sub_group_of.get(param.ds_id)
        if sub_group is not None:
            self._flats[sub_group] = None

    def persistent(self) -> list[list[tuple[int, int]]]:
        """``(first element, end)`` of the weights of each sub-group that DeepSpeed keeps gathered."""
        return [
            [
                (start, start + numel)
                for param, start, numel in zip(group, *self._segments(index), strict=True)
                if param.ds_persist
            ]
            for index, group in enumerate(self._groups)
        ]

    # Writing

    def open(self, chunk: Chunk) -> list[tuple[int, torch.Tensor]]:
        """See :meth:`WeightWriter.open`. Waits for staging buffers of weights on NVMe."""
        flat = self._flats[chunk.sub_group]
        if flat is not None:
            return [(0, flat.data[chunk.start : chunk.start + chunk.numel])]
        params = self._groups[chunk.sub_group]
        return [
            (overlap.in_chunk, _target(params[overlap.segment])[overlap.in_segment :][: overlap.numel])
            for overlap in self._overlaps(chunk)
        ]

    def close(self, chunk: Chunk) -> None:
        """See :meth:`WeightWriter.close`. A weight whose last element is there goes to NVMe, if it lives there."""
        flat = self._flats[chunk.sub_group]
        if flat is not None:
            if get_accelerator().on_accelerator(flat):
                self._counters.moved(Link.H2D, chunk.numel * flat.element_size())
                self.order_gathers()
            return
        params = [self._groups[chunk.sub_group][overlap.segment] for overlap in self._overlaps(chunk)]
        if any(get_accelerator().on_accelerator(param.ds_tensor) for param in params):
            self.order_gathers()
        for param, overlap in zip(params, self._overlaps(chunk), strict=True):
            if overlap.last:
                _finish(param)

    def addresses(self, sub_group: int) -> tuple[int, ...]:
        """See :meth:`WeightWriter.addresses`."""
        return tuple(param.ds_tensor.data_ptr() for param in self._groups[sub_group])

    def stored(self, chunk: Chunk) -> bool:
        """See :meth:`WeightWriter.stored`."""
        if self._flats[chunk.sub_group] is not None:
            return False
        params = self._groups[chunk.sub_group]
        return any(_is_stored(params[overlap.segment]) for overlap in self._overlaps(chunk))

    def holds_buffers(self, sub_group: int) -> bool:
        """See :meth:`WeightWriter.holds_buffers`."""
        return self._flats[sub_group] is None and any(_is_stored(param) for param in self._groups[sub_group])

    def keys_of(self, chunk: Chunk) -> list[int]:
        """The weights that a chunk has elements of."""
        params = self._groups[chunk.sub_group]
        return [params[overlap.segment].ds_id for overlap in self._overlaps(chunk)]

    def elements_of(self, chunk: Chunk) -> list[tuple[int, int]]:
        """``(weight, number of elements)`` of the weights that a chunk has elements of."""
        params = self._groups[chunk.sub_group]
        return [(params[overlap.segment].ds_id, overlap.numel) for overlap in self._overlaps(chunk)]

    def in_use(self) -> frozenset[int]:
        """The weights whose new values somebody could use without waiting for them, persistent ones and those that are
        gathered now, and those on NVMe, whose staging buffers the next pass needs."""
        return frozenset(
            param.ds_id
            for param in itertools.chain.from_iterable(self._groups)
            if _is_stored(param) or (_is_gathered(param) and not modules_wait_for(param))
        )

    def write(self, sub_group: int, master: torch.Tensor) -> None:
        """Rounds all master weights of a sub-group (1-D, on any device) into its shards."""
        for param, start, numel in zip(self._groups[sub_group], *self._segments(sub_group), strict=True):
            _target(param).copy_(master[start : start + numel])
            _finish(param)
        self.order_gathers()

    # Reading

    def whole_shards(self, sub_group: int) -> Iterator[tuple[int, torch.Tensor]]:
        """``(first element, shard)`` of each weight of a sub-group, reading stored ones ahead; valid until the next."""
        params = self._groups[sub_group]
        for index, start in enumerate(self._segments(sub_group)[0]):
            yield start, _shard(params[index], params[index + 1 :])
            _end_shard(params[index])

    def by_chunk(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, list[tuple[int, torch.Tensor]]]]:
        """Each chunk of one sub-group with ``(first element in the chunk, values)`` of the weights it has elements of,
        reading stored weights ahead; valid until the next."""
        if not chunks:
            return
        sub_group = chunks[0].sub_group
        flat = self._flats[sub_group]
        if flat is not None:
            for chunk in chunks:
                yield chunk, [(0, flat.data[chunk.start : chunk.start + chunk.numel])]
            return
        params, exposed = self._groups[sub_group], {}
        for chunk in chunks:
            pieces = []
            shared = self._overlaps(chunk)
            for overlap in shared:
                if overlap.segment not in exposed:
                    exposed[overlap.segment] = _shard(params[overlap.segment], params[overlap.segment + 1 :])
                values = exposed[overlap.segment][overlap.in_segment : overlap.in_segment + overlap.numel]
                pieces.append((overlap.in_chunk, values))
            yield chunk, pieces
            for overlap in shared:
                if overlap.last:
                    del exposed[overlap.segment]
                    _end_shard(params[overlap.segment])

    def _overlaps(self, chunk: Chunk) -> list[Overlap]:
        """The weights whose elements a chunk contains; requested several times per step."""
        if chunk not in self._found_overlaps:
            self._found_overlaps[chunk] = overlaps(chunk, *self._segments(chunk.sub_group))
        return self._found_overlaps[chunk]

    def _segments(self, sub_group: int) -> tuple[list[int], list[int]]:
        """First elements and lengths of a sub-group's shards."""
        if sub_group not in self._found_segments:
            numels = [partition.ds_numel for partition in self._partitions[sub_group]]
            self._found_segments[sub_group] = (list(itertools.accumulate(numels, initial=0))[:-1], numels)
        return self._found_segments[sub_group]


def _is_gathered(param: Any) -> bool:
    return bool(param.ds_persist) or param.ds_status is not ZeroParamStatus.NOT_AVAILABLE


def _is_stored(param: Any) -> bool:
    return in_tier(param) and bool(param.nvme_swapper.stored(param))


def _target(param: Any) -> torch.Tensor:
    """A parameter's shard, to be given its new value, all of it; :func:`_finish` has to follow."""
    if in_tier(param):
        return param.nvme_swapper.engine.weights.begin_update(param.ds_id)
    return values_of(param)


def _finish(param: Any) -> None:
    if in_tier(param):
        param.nvme_swapper.engine.weights.finish_update(param.ds_id)


def _shard(param: Any, following: Sequence[Any]) -> torch.Tensor:
    """A parameter's shard in host memory, and those that follow read ahead; :func:`_end_shard` has to follow."""
    if not in_tier(param):
        return values_of(param)
    weights = param.nvme_swapper.engine.weights
    (shard,) = weights.expose([param.ds_id], for_host=True)
    weights.read_ahead((other.ds_id for other in following if other.nvme_swapper is param.nvme_swapper), for_host=True)
    return shard


def _end_shard(param: Any) -> None:
    if in_tier(param):
        param.nvme_swapper.engine.weights.give_back(param.ds_id)


_ATTRIBUTE = "tencache_shared_weights"


def gathered(params: Iterable[Any]) -> None:
    """Parameters were gathered for a user, who may change them; :func:`released` has to follow."""
    for param in params:
        shared = getattr(param, _ATTRIBUTE, None)
        if shared is not None:
            shared.gathered(param)


def released(params: Iterable[Any]) -> None:
    """The user has done with gathered parameters, which are partitioned again.

    Raises:
        StorageError, SpaceError: master weights could not be rewritten.
    """
    by_owner: dict[SharedWeights, list[Any]] = {}
    for param in params:
        shared = getattr(param, _ATTRIBUTE, None)
        if shared is not None:
            by_owner.setdefault(shared, []).append(param)
    for shared, mine in by_owner.items():
        shared.released(mine)


def overwriting(param: Any) -> contextlib.AbstractContextManager[None]:
    """Around DeepSpeed's partitioning of a gathered parameter that was changed."""
    shared = getattr(param, _ATTRIBUTE, None)
    return contextlib.nullcontext() if shared is None else shared.overwriting(param)


class SharedWeights:
    """The weights of one DeepSpeed engine: a :class:`~tencache_ds.tiers.split_master.RoundedWeights`. Used by the
    training thread, and by that of an update under way.

    Args:
        groups: the parameters of each sub-group.
        weights: where they are.
        finish_step: returns when no update is under way.
    """

    def __init__(self, groups: Sequence[Sequence[Any]], weights: ModelWeights, finish_step: Callable[[], None]) -> None:
        self._state: OptimizerStateTier | None = None
        self._groups = groups
        self._weights = weights
        self._finish_step = finish_step
        self._former: dict[int, torch.Tensor] = {}
        for group in groups:
            for param in group:
                setattr(param, _ATTRIBUTE, self)

    def begin(self, state: OptimizerStateTier) -> None:
        """The optimizer's state is there, with master weights that are the difference to these weights."""
        self._state = state

    def close(self) -> None:
        """The engine ends: nothing is stored as the difference to its weights any more. Idempotent."""
        self._state = None
        self._former.clear()
        for group in self._groups:
            for param in group:
                if param.__dict__.get(_ATTRIBUTE) is self:
                    delattr(param, _ATTRIBUTE)

    # RoundedWeights

    def rounded(self, chunk: Chunk) -> list[tuple[int, torch.Tensor]] | None:
        """See :meth:`RoundedWeights.rounded`."""
        return self._weights.bfloat16_in_host_memory(chunk, self._former)

    def being_changed(self, chunk: Chunk) -> bool:
        """See :meth:`RoundedWeights.being_changed`."""
        return bool(self._former) and not self._former.keys().isdisjoint(self._weights.keys_of(chunk))

    # Changes by others

    def leaves(self, param: Any) -> None:
        """A weight is about to leave host memory."""
        self._join({param.ds_id})

    def gathered(self, param: Any) -> None:
        """See :func:`gathered`. Where a gathered weight is the shard itself, as on one rank without a device, its value
        is kept until :meth:`released`; elsewhere the shard stays as it is until the weight is partitioned."""
        shard = self._weights.shard_in_host_memory(param)
        if shard is not None and param.data.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            self._finish_step()
            self._former[param.ds_id] = shard.clone()

    def released(self, params: Sequence[Any]) -> None:
        """See :func:`released`."""
        kept = [param for param in params if param.ds_id in self._former]
        changed = {param.ds_id for param in kept if not self._is_as_before(param)}
        try:
            self._join(changed)
        finally:
            for param in kept:
                self._former.pop(param.ds_id, None)

    @contextlib.contextmanager
    def overwriting(self, param: Any) -> Iterator[None]:
        """See :func:`overwriting`."""
        shard = self._weights.shard_in_host_memory(param)
        if shard is None or param.ds_id in self._former or param.ds_status is not ZeroParamStatus.AVAILABLE:
            yield
            return
        self._finish_step()
        self._former[param.ds_id] = shard.clone()
        try:
            yield
        finally:
            self.released([param])

    def _is_as_before(self, param: Any) -> bool:
        shard, former = self._weights.shard_in_host_memory(param), self._former[param.ds_id]
        return shard is not None and torch.equal(shard.view(torch.uint8), former.view(torch.uint8))

    def _join(self, keys: set[int]) -> None:
        """Has master weights stored whole that are the difference to some weights."""
        if not keys or self._state is None:
            return
        self._finish_step()
        for sub_group in sorted({index for key in keys if (index := self._weights.sub_group_of(key)) is not None}):
            chunks = self._state.chunks(sub_group)
            self._state.join(chunk for chunk in chunks if not keys.isdisjoint(self._weights.keys_of(chunk)))


# In device memory


class DeviceWeights:
    """A :class:`tencache_ds.placement.moves.MovableWeights`. Used by the training thread, between two steps.

    Args:
        params: the model's parameters, each once.
        model_weights: where the optimizer writes them; None without an optimizer.
    """

    def __init__(self, params: Sequence[Any], model_weights: ModelWeights | None = None) -> None:
        self._params = {param.ds_id: param for param in params if _is_movable(param)}
        self._model_weights = model_weights
        self._own: dict[int, Home] = {}  # of DeepSpeed's own shards that are in device memory

    def shards(self) -> list[Shard]:
        """See :meth:`MovableWeights.shards`."""
        shards = []
        for key, param in self._params.items():
            stored = in_tier(param) and param.nvme_swapper.stored(param)
            shards.append(Shard(key, shard_nbytes(param), stored, in_tier(param) and not stored))
        return shards

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """See :meth:`MovableWeights.to_device`."""
        param = self._params[key]
        shared = getattr(param, _ATTRIBUTE, None)
        if shared is not None:
            shared.leaves(param)
        shard = memory.view(param.ds_tensor.dtype)
        if in_tier(param):
            param.nvme_swapper.to_device(param, shard)
            return
        if self._model_weights is not None:
            self._model_weights.part_from_flat(param)
        self._own[key] = home = Home(param.ds_tensor.data)
        home.to_device(shard)
        param.ds_tensor.data = shard

    def to_host(self, key: int) -> None:
        """See :meth:`MovableWeights.to_host`."""
        param = self._params[key]
        if in_tier(param):
            param.nvme_swapper.to_host(param)
            return
        home = self._own.pop(key)
        home.memory = param.ds_tensor.data  # DeepSpeed may have given it other memory
        home.leave_device()
        param.ds_tensor.data = home.memory

    def belongs_to_host(self, key: int) -> bool:
        """See :meth:`MovableWeights.belongs_to_host`."""
        home = self._home_of(key)
        return home is not None and home.place is Place.GPU and home.returns_to is Place.HOST

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """See :meth:`MovableWeights.host_nbytes_of`."""
        homes = (self._home_of(key) for key in keys)
        return sum(home.missing_nbytes for home in homes if home is not None)

    def free_unused(self) -> int:
        """See :meth:`MovableWeights.free_unused`. The memory of DeepSpeed's own shards is never freed."""
        tiers = {param.nvme_swapper.engine.weights for param in self._params.values() if in_tier(param)}
        return sum(tier.free_unused() for tier in tiers)

    def _home_of(self, key: int) -> Home | None:
        """The home of a weight; None of one of DeepSpeed's own that is where DeepSpeed has put it."""
        param = self._params[key]
        return home_in_tier(param) if in_tier(param) else self._own.get(key)


def lies_on_device(param: Any) -> bool:
    """Whether DeepSpeed itself keeps a plain shard of it in device memory, and no second one or quantized values."""
    return _has_plain_shard(param) and not in_tier(param) and _on_device(param.ds_tensor)


def place_of(param: Any) -> Place:
    """Where the shard of a weight lives between two uses."""
    if in_tier(param):
        return home_in_tier(param).place
    return Place.GPU if _on_device(param.ds_tensor) else Place.HOST


def _is_movable(param: Any) -> bool:
    """Whether DeepSpeed keeps a plain shard of it off the device, and no second one or quantized values."""
    return _has_plain_shard(param) and (in_tier(param) or not _on_device(param.ds_tensor))


def _has_plain_shard(param: Any) -> bool:
    shard = getattr(param, "ds_tensor", None)
    if shard is None or hasattr(shard, "ds_quant_scale") or getattr(param, "ds_secondary_tensor", None) is not None:
        return False
    return in_tier(param) or shard.status is PartitionedParamStatus.AVAILABLE


def _on_device(shard: torch.Tensor) -> bool:
    """Without a device, host memory is none."""
    return not get_accelerator().is_synchronized_device() and bool(get_accelerator().on_accelerator(shard))


class GatheredWeights:
    """A :class:`tencache_ds.placement.moves.MovableWeights`; see [Note: weights that stay gathered]. Used by the
    thread that computes, between passes.

    Args:
        params: the model's parameters, each once.
        model_weights: where the optimizer writes them; None without an optimizer.
        may_stay: whether any may stay gathered.
    """

    def __init__(
        self, params: Sequence[Any], model_weights: ModelWeights | None = None, *, may_stay: bool = True
    ) -> None:
        self._params = {param.ds_id: param for param in params}
        self._weights = DeviceWeights(params, model_weights)
        self._single = dist.get_world_size() == 1
        self._stay = may_stay and self._single
        self._there: set[int] = set()
        self._version = 0

    @property
    def stay_gathered(self) -> bool:
        """Whether weights in GPU memory do."""
        return self._stay

    @property
    def version(self) -> int:
        """Another one whenever a weight has moved."""
        return self._version

    def stays(self, param: Any) -> bool:
        """Whether a parameter stays gathered: its shard is in GPU memory, moved there or by DeepSpeed itself."""
        return self._stay and (param.ds_id in self._there or lies_on_device(param))

    def shards(self) -> list[Shard]:
        """See :meth:`MovableWeights.shards`."""
        return self._weights.shards()

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        """See :meth:`MovableWeights.to_device`."""
        if self._single:
            _release(self._params[key])  # a copy of the shard
        self._weights.to_device(key, memory)
        self._there.add(key)
        self._version += 1

    def to_host(self, key: int) -> None:
        """See :meth:`MovableWeights.to_host`."""
        if self._single:
            _release(self._params[key])
        self._weights.to_host(key)
        self._there.discard(key)
        self._version += 1

    def belongs_to_host(self, key: int) -> bool:
        """See :meth:`MovableWeights.belongs_to_host`."""
        return self._weights.belongs_to_host(key)

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        """See :meth:`MovableWeights.host_nbytes_of`."""
        return self._weights.host_nbytes_of(keys)

    def free_unused(self) -> int:
        """See :meth:`MovableWeights.free_unused`."""
        return self._weights.free_unused()


def _release(param: Any) -> None:
    if param.ds_status is ZeroParamStatus.AVAILABLE:
        param.partition()
