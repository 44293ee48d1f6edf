# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of functions that are called many times a step with tensors of the same few shapes.

The orthogonalization of one matrix is about 60 kernels, and the thread that launches them takes longer than the device
that runs them. A graph launches the same kernels, with the same results, at once.

Measured on an H200: ``step()`` of 1.2 B parameters with Muon takes 0.15 instead of 0.38 s.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

logger = logging.getLogger("DeepSpeed.tencache")

WORTH_CALLS = 4
"""Calls in a step for which a graph is made: to make it takes the launches of a call, and some more time."""


@dataclass(slots=True)
class _Calls:
    """Calls of a step that differ in values only.

    Attributes:
        values: in which each of them works. torch compiles a function again for a tensor that is a view of another
            shape, or on another stream, and must not while a graph is made: calls without one work there too.
        graph: what they launch, or None.
    """

    values: torch.Tensor
    graph: Any


class LaunchGraphs:
    """Calls functions of a tensor, in the order of the current stream, by graphs from the second step on: by then
    kernels are compiled, and it is known which calls recur. Takes no device memory between steps. Used by one thread.

    Args:
        enabled: whether graphs may be made. On other devices than CUDA's, and with a torch that cannot give their
            memory back, functions are called directly all the same.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and get_accelerator().device_name() == "cuda" and hasattr(torch.cuda, "MemPool")
        self._counts: collections.Counter[Hashable] = collections.Counter()
        self._last_counts: collections.Counter[Hashable] = collections.Counter()  # of the last step
        self._calls: dict[Hashable, _Calls] = {}
        self._memory: Any = None
        self._stream: Any = None
        self._failed: Any = None  # a graph that could not be made: torch's allocator still asks it

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around the calls of a step, which the device has to have done at its end."""
        self._counts.clear()
        try:
            yield
        finally:
            for calls in self._calls.values():
                if calls.graph is not None:
                    calls.graph.reset()
            self._calls.clear()
            self._memory = None
        self._last_counts = self._counts.copy()

    def run(self, key: Hashable, function: Callable[[torch.Tensor], None], values: torch.Tensor) -> None:
        """Calls ``function(values)``.

        Args:
            key: equal for calls of functions that do the same with tensors of the same shape and dtype.
            function: changes the tensor in place, and does not wait for the device.
            values: on the current device.
        """
        if not self._enabled:
            function(values)
            return
        self._counts[key] += 1
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = _Calls(torch.empty_like(values), None)
            if self._last_counts[key] >= WORTH_CALLS and self._failed is None:
                calls.graph = self._record(function, calls.values)
        calls.values.copy_(values)
        if calls.graph is not None:
            calls.graph.replay()
        else:
            with self._on_stream():
                function(calls.values)
        values.copy_(calls.values)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Within the block the stream is current on which graphs are made, which cannot be the default one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, function: Callable[[torch.Tensor], None], values: torch.Tensor) -> Any:
        """A graph of the function; None where that fails, after which none is made."""
        graph = torch.cuda.CUDAGraph()
        try:
            if self._memory is None:
                self._memory = torch.cuda.MemPool()
            with self._on_stream():  # other threads use the device meanwhile
                graph.capture_begin(pool=self._memory.id, capture_error_mode="thread_local")
                try:
                    function(values)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            logger.warning(
                "Muon is launched kernel by kernel from here on, and slower: no CUDA graph could be made: %s",
                error.__context__ or error,
            )
            self._failed = graph, self._memory
            if self._memory is not None:
                with contextlib.suppress(RuntimeError):  # what a capture_end() that raises has left undone
                    torch._C._cuda_endAllocateToPool(values.device.index, self._memory.id)
            return None
        return graph
