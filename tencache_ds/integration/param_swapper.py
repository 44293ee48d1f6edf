# SPDX-License-Identifier: Apache-2.0
"""The weight swapper that DeepSpeed's parameters see (``param.nvme_swapper``), in front of the weight tier.

[Note: who holds a weight's bytes]

DeepSpeed keeps two states per parameter: ``param.ds_status`` (is the gathered weight on the device?) and
``param.ds_tensor.status`` (is this rank's shard in host memory?). TenCache keeps its own ([Note: home and copy] in
:mod:`tencache_ds.tiers.weight_homes`). They meet here:

- ``ds_tensor.status`` is NOT_AVAILABLE while the shard is on NVMe, *also while it is being read ahead*. It becomes
  AVAILABLE only when the training asks for it or when the coordinator commits it at a point that is the same on every
  rank, because it decides which parameters enter a collective together.
- Once the gather has copied the shard to the device, the staging buffer goes back to the pool (``retire``), but
  ``ds_tensor.status`` stays AVAILABLE, with a placeholder for the tensor, until DeepSpeed partitions the parameter. So
  a parameter that is live on the device holds no host memory, regardless of ``stage3_max_live_parameters``, unless its
  next use comes before that of every weight that waits for a buffer: then the bytes stay staged and are not read again.
- ``ds_status`` INFLIGHT does not mean that the shard was copied: DeepSpeed sets it before it issues the copies, and
  another autograd thread may read the status in between. The coordinator knows (``issued``): it is true when DeepSpeed
  has filed the handle of the gather. The copy was issued on the stream that was current when the shard was exposed.
- A shard that was read straight into GPU memory is copied at once, on the stream on which DeepSpeed gathers, and its
  staging buffer goes back behind that copy (``commit``). DeepSpeed would not copy it: on one rank the gathered weight
  would be the staging buffer itself, and on several a collective would read the buffer on its own stream. The copy is
  ordinary memory; ``ds_tensor`` releases it when the gather is over, because until then the collective may hold that
  very tensor.
- A parameter changed inside ``GatheredParameters`` gets a buffer for its new shard while DeepSpeed partitions it
  (``overwriting``), and at no other time: when a forward inside the context has released the parameter, its change is
  lost, as with CPU offload, and there is nothing to write. Nor is there if it was not changed: DeepSpeed cannot tell
  (it saves a model in 16 bits within such contexts), so a digest is taken when it is read and when it is to be written.
- While a shard is not in memory, ``ds_tensor`` is a placeholder: it has the shard's shape and dtype, but all its
  elements share one NaN. It cannot be mistaken for values, and refuses to be read or written.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
import xxhash
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.integration.config_checks import options_of
from tencache_ds.integration.engine_building import build_engine
from tencache_ds.integration.hooked_modules import n_user_gathers, uncompiled
from tencache_ds.integration.watched_tensors import show, show_absent, values_of
from tencache_ds.io.backends.lanes import run_before_exit
from tencache_ds.observability.counters import Access, Link
from tencache_ds.runtime.engine import TenCacheEngine
from tencache_ds.tensors import filled

SMALLEST_STORED_NBYTES = 64 * 2**10
"""Shards below this stay in host memory: reading them costs a disk access and saves next to nothing."""


def swapper_factory(stock: Callable[[Any, torch.dtype], Any]) -> Callable[[Any, torch.dtype], Any]:
    """Replaces DeepSpeed's swapper class: builds ours for configs that select TenCache, else the stock one."""

    @functools.wraps(stock, updated=())
    def make_param_swapper(ds_config: Any, model_dtype: torch.dtype) -> Any:
        options = options_of(ds_config)
        if options is None:
            return stock(ds_config, model_dtype)
        threshold = ds_config.zero_config.param_persistence_threshold
        return ParamSwapper(build_engine(ds_config, options), model_dtype, threshold)

    return make_param_swapper


class ParamSwapper:
    """The interface of ``AsyncPartitionedParameterSwapper`` that DeepSpeed's partitioning uses.

    Every method may be called from the training thread and from autograd threads.
    """

    def __init__(self, engine: TenCacheEngine, dtype: torch.dtype, persistence_threshold: int) -> None:
        """
        Args:
            engine: where the weights go.
            dtype: the model's dtype. Single weights may have another one.
            persistence_threshold: parameters up to this many elements stay on the device, so their shards stay
                resident.
        """
        self.engine = engine
        self._weights = engine.weights
        self._dtype = dtype
        self._persistence_threshold = persistence_threshold
        self._exposed: dict[int, Any] = {}
        self._copied_on: dict[int, Any] = {}  # the stream on which an exposed shard is copied to the device
        self._followers: list[Callable[[int], None]] = []
        self._overwriting: set[int] = set()
        self._changeable: set[int] = set()  # gathered by a user who may change them
        self._read: dict[int, bytes] = {}  # of these, digests of the shards as they were read
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._params: dict[int, weakref.ref[Any]] = {}
        self._n_frozen = gc.get_freeze_count()
        self._copied: dict[int, Any] = {}  # their ds_tensor is a copy in GPU memory, until the gather is over
        self._bypassed_host: set[int] = set()  # gathered weights that never were in host memory
        self._lock = threading.RLock()
        withdraw = weakref.WeakMethod(self._withdraw)
        engine.before_unclaim = lambda: (withdraw() or (lambda: None))()
        # The weights live as long as a parameter, or DeepSpeed's factory of parameters, refers to this swapper.
        weakref.finalize(self, _close_from_any_thread, engine).atexit = False

    # First partition of a parameter

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a shard of ``numel`` elements is managed here; smaller ones stay with DeepSpeed, in host memory.

        DeepSpeed names no parameter when it asks, so bytes are counted in the model's dtype. A weight of another dtype
        stays with DeepSpeed up to as many elements.
        """
        numel = param.ds_tensor.ds_numel if numel is None else numel
        return numel * self._dtype.itemsize >= SMALLEST_STORED_NBYTES

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """The 1-D host tensor in which DeepSpeed puts a new parameter's shard for the first time."""
        self._params[param.ds_id] = weakref.ref(param)
        # As DeepSpeed creates a shard: in the parameter's dtype, unless zero.Init has replaced this constructor, which
        # then gives the model's dtype where another one of floating point is asked for.
        return self._register(param, numel, torch.empty(0, dtype=param.dtype).dtype)  # noqa: TID251

    def _register(self, param: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        shape = "x".join(str(size) for size in param.ds_shape) or "scalar"
        name = f"weight id {param.ds_id} ({shape})"
        resident = param.ds_persist or param.ds_numel <= self._persistence_threshold
        return self._weights.register(param.ds_id, name, numel, dtype, always_resident=resident)

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """DeepSpeed has put new values into the shards' buffers: they go to NVMe, the buffers back."""
        for swapper, mine in _by_swapper(params):
            swapper._write(mine)

    def _write(self, params: Sequence[Any]) -> None:
        with self._lock:
            for param in params:
                key = param.ds_id
                if self._weights.homes.is_resident(key):
                    continue
                unchanged = key in self._read and self._read[key] == _digest(param)
                self._hide(param)
                if key in self._overwriting:
                    self._overwriting.remove(key)
                    if unchanged:
                        self._weights.abandon_overwrite(key)
                    else:
                        self._weights.finish_overwrite(key)
                else:
                    self._weights.store_initial(key)
                self._gone(key)

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """DeepSpeed announces its largest sub-group; the weight tier needs no extra buffer for it."""

    # Reading

    @uncompiled
    def swap_in(self, params: Sequence[Any], async_op: bool = False, swap_in_buffers: Any = None) -> None:
        """DeepSpeed gathers weights that no module's fetch has committed (``GatheredParameters``): reads them."""
        for swapper, mine in _by_swapper(params):
            swapper.commit(mine)
            for param in mine:
                if param.ds_id in swapper._changeable and param.ds_tensor.device.type == "cpu":
                    swapper._read[param.ds_id] = _digest(param)
            if get_accelerator().is_synchronized_device():
                swapper._copy_out(mine)

    def commit(self, params: Sequence[Any]) -> None:
        """Brings shards into memory, waits for them and shows them to DeepSpeed; on the stream of the coming gather."""
        with self._lock:
            params = [param for param in params if param.ds_id not in self._copied]  # those wait for their gather
            shards = self._weights.expose([param.ds_id for param in params])
            stream = get_accelerator().current_stream()
            copied = []
            for param, shard in zip(params, shards, strict=True):
                key = param.ds_id
                direct = self._weights.staged_for_gpu(key)
                show(param, shard.clone() if direct else shard)
                param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
                if direct:
                    copied.append(key)
                    self._copied[key] = param
                    self._bypassed_host.add(key)
                else:
                    self._exposed[key] = param
                    self._copied_on[key] = stream
                    self._bypassed_host.discard(key)
            event = _event_on(None) if copied else None
            for key in copied:
                self._weights.give_back(key, event)

    def _copy_out(self, params: Sequence[Any]) -> None:
        """On a CPU accelerator a gathered weight aliases its shard, and so do references kept by a user (a state dict):
        they must refer to ordinary memory, not to a staging buffer."""
        with self._lock:
            for param in params:
                if self._exposed.pop(param.ds_id, None) is not None:
                    show(param, values_of(param).clone())
                    self._weights.give_back(param.ds_id)

    def synchronize_reads(self) -> None:
        """Nothing is ever left in flight in DeepSpeed's eyes: :meth:`swap_in` waits."""

    @uncompiled
    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """The gathered weights leave the device; a shard still in a staging buffer returns it."""
        for swapper, mine in _by_swapper(params):
            swapper._release(mine)

    def _release(self, params: Sequence[Any]) -> None:
        with self._lock:
            event = None
            for param in params:
                key = param.ds_id
                if key not in self._bypassed_host and not self._weights.homes.on_device(key):
                    self.engine.counters.moved(Link.H2D, self._weights.homes.nbytes_of(key))
                if self._weights.homes.is_resident(key):
                    self.engine.counters.accessed(Access.RESIDENT)
                    continue
                if self._exposed.pop(key, None) is not None:
                    event = event or _event_on(None)
                    self._weights.give_back(key, event)
                self._copied.pop(key, None)
                self._bypassed_host.discard(key)
                self._hide(param)
                self._gone(key)

    # The interface of the coordinator

    def follow(self, gone: Callable[[int], None]) -> None:
        """From now on ``gone(ds_id)`` is called for weights that leave the device, or were committed for it and are
        withdrawn."""
        self._followers.append(gone)

    @property
    def read_ahead_nbytes(self) -> int:
        """Bytes of the staging buffers that shards are read ahead into."""
        return self._weights.read_ahead_nbytes

    def manages(self, param: Any) -> bool:
        """Whether the parameter's shard is in the weight tier, wherever it lives."""
        return self._weights.homes.holds(param.ds_id)

    def stored(self, param: Any) -> bool:
        """Whether the parameter's shard lives on NVMe."""
        return self.manages(param) and not self._weights.homes.is_resident(param.ds_id)

    def ready(self, param: Any) -> bool:
        """Whether the shard can be exposed without waiting."""
        return param.ds_id in self._copied or self._weights.ready(param.ds_id)

    def read_ahead(self, param: Any) -> bool:
        """Starts reading a shard, unless it is on the device, in memory or on its way there; never blocks.

        Returns:
            False when it has to wait for a free staging buffer.
        """
        with self._lock:
            if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE or param.ds_id in self._copied:
                return True
            return not self.stored(param) or self._weights.read_one_ahead(param.ds_id)

    def retire(self, issued: Callable[[Any], bool], keep: Callable[[int], bool]) -> None:
        """Gives back the staging buffers of shards that are copied to the device.

        Args:
            issued: whether the copy of a parameter's shard has been issued; :meth:`commit` has seen the stream.
            keep: whether the bytes of a weight (by its id) are to stay staged for its next use.
        """
        with self._lock:
            events: dict[Any, Any] = {}
            for key, param in list(self._exposed.items()):
                if not issued(param):
                    continue
                if n_user_gathers(param):
                    continue  # the user may change it and have it written from this buffer
                if get_accelerator().is_synchronized_device():
                    if _shares_storage(param.data, param.ds_tensor):
                        # On a CPU accelerator "copying to the device" aliases; make the copy that a device would have.
                        param.data = param.data.clone()
                    elif param.ds_status is ZeroParamStatus.INFLIGHT:
                        continue  # a collective may still read the shard
                stream = self._copied_on.pop(key, None)
                if stream not in events:
                    events[stream] = _event_on(stream)
                del self._exposed[key]
                show_absent(param, self._stand_in(param))
                self._weights.give_back(key, events[stream], keep=keep(key))
            for key, param in list(self._copied.items()):
                if param.ds_status is ZeroParamStatus.AVAILABLE:
                    del self._copied[key]
                    show_absent(param, self._stand_in(param))

    def hide_unused(self) -> None:
        """Withdraws weights that were committed but never gathered."""
        with self._lock:
            for key, param in list(self._copied.items()):
                if param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                    del self._copied[key]
                    self._bypassed_host.discard(key)
                    self._hide(param)
                    self._gone(key)
            for key, param in list(self._exposed.items()):
                if param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                    del self._exposed[key]
                    self._hide(param)
                    self._weights.give_back(key)
                    self._gone(key)

    # Device memory

    def to_device(self, param: Any, memory: torch.Tensor) -> None:
        """Makes a shard resident in device memory (1-D, of its length); the parameter must be unused meanwhile."""
        with self._lock:
            self._weights.to_device(param.ds_id, memory)
            show(param, memory)
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def to_host(self, param: Any) -> None:
        """Takes a shard out of device memory, to where it was before."""
        with self._lock:
            host = self._weights.to_host(param.ds_id)
            if host is None:
                self._hide(param)
                self._gone(param.ds_id)
            else:
                show(param, host)

    # Changing weights outside the optimizer

    @contextlib.contextmanager
    def overwriting(self, param: Any) -> Iterator[None]:
        """Around DeepSpeed's partitioning of a gathered parameter that was changed: ``ds_tensor`` is a buffer for the
        new shard. DeepSpeed fills it and calls :meth:`swap_out_and_release`; if it does not get there, the old value
        stays.
        """
        key = param.ds_id
        if param.ds_tensor is None or param.ds_status is not ZeroParamStatus.AVAILABLE or not self.stored(param):
            yield  # it is partitioned for the first time, was released before, or stays in host memory
            return
        with self._lock:
            self._exposed.pop(key, None)
            self._copied_on.pop(key, None)
            self._copied.pop(key, None)
            self._bypassed_host.discard(key)
            show(param, self._weights.begin_overwrite(key))
            self._overwriting.add(key)
        try:
            yield
        finally:
            with self._lock:
                if key in self._overwriting:
                    self._overwriting.remove(key)
                    show_absent(param, self._stand_in(param))
                    self._weights.abandon_overwrite(key)

    def replace(self, param: Any, value: torch.Tensor) -> None:
        """Replaces a stored shard that is not in use by ``value`` (1-D, the shard's length); goes to NVMe."""
        with self._lock:
            self._read.pop(param.ds_id, None)
            self._weights.overwrite(param.ds_id, value)

    def cast(self, param: Any, dtype: torch.dtype) -> None:
        """Gives a weight that is not in use another dtype, to which its shard is rounded; that may change its home.

        Raises:
            StorageError: its shard could not be read.
            TenCacheError: it is in use.
        """
        with self._lock:
            key = param.ds_id
            value = self._weights.read(key)
            self._weights.drop([key])
            self._stand_ins.pop(key, None)
            show(param, self._register(param, value.numel(), dtype).copy_(value))
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
            self._write([param])

    def read(self, param: Any) -> torch.Tensor:
        """A copy of a shard as it was last stored, 1-D in host memory."""
        return self._weights.read(param.ds_id)

    def scan(self, params: Sequence[Any], visit: Callable[[Any, torch.Tensor], None]) -> None:
        """Passes unused shards to ``visit(param, shard)``, one after another, reading ahead."""
        by_key = {param.ds_id: param for param in params}
        self._weights.scan(list(by_key), lambda key, shard: visit(by_key[key], shard))

    # Mechanics

    def _gone(self, key: int) -> None:
        for gone in self._followers:
            gone(key)

    def _withdraw(self) -> None:
        """The staging buffers are about to go: nothing that DeepSpeed or a user sees may look into them any more."""
        with self._lock:
            for key, param in [*self._exposed.items(), *self._copied.items()]:
                if key in self._exposed and _shares_storage(param.data, param.ds_tensor):
                    param.data = param.data.clone()
                if param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                    self._bypassed_host.discard(key)
                    self._hide(param)
                else:
                    show_absent(param, self._stand_in(param))
                self._gone(key)
            self._exposed.clear()
            self._copied_on.clear()
            self._copied.clear()
            self._followers.clear()

    def split(self, params: Sequence[Any]) -> ParamSwapper:
        """A swapper, with an engine, for some of the weights, which form a separate model. None may be in use."""
        with self._lock:
            self._withdraw()
            keys = [param.ds_id for param in params]
            for param in params:
                self._weights.give_back(param.ds_id)
            part = ParamSwapper(self.engine.split(keys), self._dtype, self._persistence_threshold)
            for param in params:
                part._bypassed_host.update(self._bypassed_host & {param.ds_id})
                if param.ds_id in self._params:
                    part._params[param.ds_id] = self._params.pop(param.ds_id)
                param.nvme_swapper = part
        return part

    def drop_unused(self, candidates: Set[int]) -> None:
        """Releases the weights among the candidates whose parameters are gone: a model that ties two of its weights
        has created both. Parameters refer to themselves, so that most are there until garbage is collected."""
        if gc.get_freeze_count() != self._n_frozen:  # what was frozen meanwhile cannot be looked at
            return
        gc.collect()
        with self._lock:
            gone = {key for key in candidates if (param := self._params.get(key)) is not None and param() is None}
            if gone:  # copies of a parameter, as in a copy of the model, have its identifier
                # By their types: isinstance() asks the objects themselves, and some of them warn or import something.
                tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
                gone -= {getattr(tensor, "ds_id", None) for tensor in tensors}
            for key in gone:  # what is in use has its parameter
                del self._params[key]
                self._stand_ins.pop(key, None)
                self._copied_on.pop(key, None)
            self._bypassed_host -= gone
            self._weights.drop(gone)

    def _stand_in(self, param: Any) -> torch.Tensor:
        """The placeholder in ``ds_tensor`` while the shard is not in memory: its shape in the memory of one element."""
        stand_in = self._stand_ins.get(param.ds_id)
        if stand_in is None:
            dtype, numel = param.ds_tensor.dtype, param.ds_tensor.ds_numel
            absent = math.nan if dtype.is_floating_point or dtype.is_complex else -1 if dtype.is_signed else 1
            stand_in = self._stand_ins[param.ds_id] = filled(1, absent, dtype).expand(numel)
        return stand_in

    def _hide(self, param: Any) -> None:
        show_absent(param, self._stand_in(param))
        param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE


def _close_from_any_thread(engine: TenCacheEngine) -> None:
    """Garbage is collected on any thread, also on one of the I/O lanes that closing waits for."""
    run_before_exit(engine.close, "tencache-close")


def begin_changes(params: Sequence[Any]) -> None:
    """A user is about to gather weights in order to change them (``GatheredParameters`` with ``modifier_rank``, as for
    saving a model in 16 bits, too): those that still are what they were are not written to NVMe afterwards."""
    for swapper, mine in _by_swapper(_managed(params)):
        for param in mine:
            swapper._changeable.add(param.ds_id)
            swapper._read.pop(param.ds_id, None)


def end_changes(params: Sequence[Any]) -> None:
    """The end of :func:`begin_changes`, after the weights were written."""
    for swapper, mine in _by_swapper(_managed(params)):
        for param in mine:
            swapper._changeable.discard(param.ds_id)
            swapper._read.pop(param.ds_id, None)


def _managed(params: Sequence[Any]) -> list[Any]:
    return [param for param in params if isinstance(getattr(param, "nvme_swapper", None), ParamSwapper)]


def _digest(param: Any) -> bytes:
    """Digest of this rank's part of a weight, in its shard in host memory, without padding."""
    shard = values_of(param)
    begin = shard.numel() * dist.get_rank(param.ds_process_group)
    part = shard[: max(min(shard.numel(), param.ds_numel - begin), 0)]
    return xxhash.xxh3_128_digest(part.view(torch.uint8).numpy().data)


def _by_swapper(params: Sequence[Any]) -> Iterator[tuple[ParamSwapper, list[Any]]]:
    """Each swapper with its weights: DeepSpeed hands weights of several ``zero.Init`` contexts to the first one's."""
    groups: dict[int, list[Any]] = {}
    for param in params:
        groups.setdefault(id(param.nvme_swapper), []).append(param)
    for group in groups.values():
        yield group[0].nvme_swapper, group


def _shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _event_on(stream: Any) -> Any:
    """An event after everything issued so far on ``stream`` (None: the current one), or None on a synchronised
    device.
    """
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    event = accelerator.Event()
    event.record(stream if stream is not None else accelerator.current_stream())
    return event
