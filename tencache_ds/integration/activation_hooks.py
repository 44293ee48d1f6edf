# SPDX-License-Identifier: Apache-2.0
"""Where DeepSpeed's forward pass meets :mod:`tencache_ds.activations`.

Autograd's hooks for saved tensors are installed around ``DeepSpeedEngine.forward``, outside of what may be compiled. A
block under torch's activation checkpointing, and so a ``GradientCheckpointingLayer`` of transformers, saves its input
through them. DeepSpeed's own checkpointing keeps its inputs itself, and gives them to its offload engine if
``cpu_checkpointing`` is on: :class:`_Inputs` takes that engine's place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_ds.activations.blocks import KeptTensor, MovedTensor
from tencache_ds.activations.saved_tensors import SavedTensors
from tencache_ds.integration.hooked_modules import params_of
from tencache_ds.integration.seams import Feature, works

logger = logging.getLogger("DeepSpeed.tencache")


class ActivationHooks:
    """Hooks of one engine. Used by the training thread."""

    def __init__(self) -> None:
        self._saved: SavedTensors | None = None
        self._weights: dict[int, StorageWeakRef] = {}
        self._warned = False

    def use(self, saved: SavedTensors) -> None:
        """What moves the tensors."""
        self._saved = saved

    # Weights

    def note_weights(self, module: torch.nn.Module) -> None:
        """The weights of a module were gathered: their storages, and those of their shards, are no activations."""
        for param in params_of(module).values():
            for tensor in (param.data, getattr(param, "ds_tensor", None)):
                if tensor is not None and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._weights:
                        # As long as there is a weak reference, no other storage gets this address.
                        self._weights[storage._cdata] = StorageWeakRef(storage)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the storage of a weight."""
        return tensor.untyped_storage()._cdata in self._weights

    # The forward pass

    @contextlib.contextmanager
    def around_forward(self, elements: int) -> Iterator[None]:
        """What the block saves for backward is moved, unless a hook around it wants those tensors for itself.

        Args:
            elements: of its input; 0 if that is not known.
        """
        if self._saved is None or self._is_taken():
            yield
            return
        self._weights = {key: each for key, each in self._weights.items() if not each.expired()}
        if not self._saved.begin_forward(elements):
            yield
            return
        before = getattr(_active, "saved", None)
        _active.saved = self._saved
        try:
            with saved_tensors_hooks(self._saved.save, self._unpack), _aside_for_transforms(self._saved.save):
                yield
        finally:
            _active.saved = before

    def begin_backward(self) -> None:
        """A backward pass begins."""
        if self._saved is not None:
            self._saved.begin_backward()

    def _unpack(self, handle: MovedTensor | KeptTensor) -> torch.Tensor:
        if isinstance(handle, KeptTensor):
            return handle.unpack()
        saved = self._saved
        assert saved is not None  # it has made the handle
        return saved.load(handle)

    def _is_taken(self) -> bool:
        autograd: Any = torch._C._autograd
        if autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(True) is None:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "activations stay in device memory: the script has hooks for saved tensors around the forward pass, or "
                "has switched them off"
            )
        return True


_active = threading.local()
"""``saved``: the :class:`SavedTensors` of the forward pass that the thread is in."""


@contextlib.contextmanager
def _aside_for_transforms(pack: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Within the block torch's function transforms (``torch.func.grad``, ``vjp``, ``jacrev``, ``hessian``), which
    refuse to work under hooks for saved tensors, do not find those of ``pack``. What a transform saves stays on the
    device."""
    autograd, graph = torch._C._autograd, torch.autograd.graph
    stock = graph.disable_saved_tensors_hooks

    @contextlib.contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        hooks = autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks[0] != pack:  # those of somebody else
            with stock(error_message):
                yield
            return
        autograd._pop_saved_tensors_default_hooks()
        try:
            with stock(error_message):
                yield
        finally:
            autograd._push_saved_tensors_default_hooks(*hooks)

    graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = stock


class _Inputs:
    """The inputs of blocks under DeepSpeed's own activation checkpointing: what its ``_ActivationOffloadEngine`` does.

    Args:
        saved: what moves them.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved

    def offload_input(self, tensor: torch.Tensor) -> MovedTensor | None:
        """A token to get it back with; None: DeepSpeed has to keep it."""
        handle = self._saved.save(tensor)
        return handle if isinstance(handle, MovedTensor) else None

    def restore_input(self, token: MovedTensor) -> torch.Tensor:
        """The tensor."""
        return self._saved.load(token)


def _elements(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Elements of the main input, all sequences together: by its name in transformers, else of the first tensor; 0 if
    there is none."""
    main = kwargs.get(getattr(module, "main_input_name", ""))
    for value in (main, kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.numel()
        if isinstance(value, Mapping):
            elements = _elements(module, (), value)
        elif isinstance(value, (list, tuple)):
            elements = _elements(module, value, {})
        else:
            continue
        if elements:
            return elements
    return 0


@contextlib.contextmanager
def _advice(engine: Any) -> Iterator[None]:
    """Says what helps if device memory runs out within the block, and the engine does not move activations."""
    try:
        yield
    except torch.OutOfMemoryError:
        optimizer = getattr(engine, "optimizer", None)
        session = getattr(optimizer, "tencache", None)
        if session is not None and session.activations is None:
            logger.warning(
                "rank %d: GPU memory ran out in a training pass. A batch whose activations do not fit trains with "
                '"tencache": {"activations": "auto"} in the DeepSpeed config, which moves them to RAM or NVMe; try '
                "activation checkpointing first",
                dist.get_rank(),
            )
        raise


def hook_passes(engine_class: Any, checkpointing: Any) -> None:
    """Connects the engines that move activations, advises the others of TenCache where memory runs out, and leaves the
    rest to DeepSpeed.

    Args:
        engine_class: ``DeepSpeedEngine``.
        checkpointing: DeepSpeed's module of that name.
    """
    stock_forward = engine_class.forward

    @functools.wraps(stock_forward)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        hooks = getattr(getattr(self, "optimizer", None), "activation_hooks", None)
        if not self.module.training or not torch.is_grad_enabled():
            return stock_forward(self, *inputs, **kwargs)
        with _advice(self) if hooks is None else hooks.around_forward(_elements(self.module, inputs, kwargs)):
            return stock_forward(self, *inputs, **kwargs)

    engine_class.forward = forward
    stock_backward = engine_class.backward

    @functools.wraps(stock_backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _advice(self):
            return stock_backward(self, *args, **kwargs)

    engine_class.backward = backward
    if not works(Feature.ACTIVATIONS):
        return
    stock_engine = checkpointing._get_cpu_offload_engine

    @functools.wraps(stock_engine)
    def _get_cpu_offload_engine() -> Any:
        saved = getattr(_active, "saved", None)
        if saved is None or not checkpointing.CPU_CHECKPOINT or checkpointing.PARTITION_ACTIVATIONS:
            return stock_engine()
        return _Inputs(saved)

    checkpointing._get_cpu_offload_engine = _get_cpu_offload_engine
