# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way into DeepSpeed's buckets, several at a time, and their norms: DeepSpeed's, bit for bit, with
one kernel for each gradient on the device instead of three.

As soon as a weight's gradient is complete, DeepSpeed copies it into a bucket that is reduced as a whole. For each one
the stream of reductions waits for the stream of arithmetic, and a copy is launched: about 100 microseconds of the
thread that computes, a fifth of a backward pass whose arithmetic does not fill the device. Here a few gradients are
collected first; then the stream waits once, and one launch copies them all, to the same places.

Measured on two H200: a backward pass of 1.3 B parameters takes 0.12 instead of 0.18 s. Measured on a CPU: the norms of
291 gradients take 14 ms of the thread that computes, DeepSpeed's way 29 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tencache_ds.host_path.parts import HostPath
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.integration.hooked_modules import uncompiled

COLLECTED_NUMEL = 32 * 2**20
"""Elements of the gradients that are collected, at most. So much more device memory may be in use for a moment."""

COLLECTED_SHARE = 1 / 16
"""Upper bound as a share of ``reduce_bucket_size``, which users shrink when memory is scarce."""


@dataclass(frozen=True, slots=True)
class _Collected:
    """A gradient that has its place in a bucket, and is not there yet.

    Attributes:
        param: its parameter.
        bucket: DeepSpeed's.
        start: the place: first element in the bucket.
        stream: on which it was computed.
    """

    param: Any
    bucket: Any
    start: int
    stream: Any


class GradientBucketsMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's methods for :class:`TenCacheZeroOptimizer_Stage3`. Used by the thread that computes."""

    host_path: HostPath
    _collected: list[_Collected]
    _collected_numel = 0

    @uncompiled
    def _DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(self, param: Any) -> None:
        """DeepSpeed's addition of a gradient to a bucket."""
        if not self.host_path.buckets:
            super()._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(param)
            return
        bucket, grad = self.ipg_buckets[self.get_param_comm_dtype(param)], param.grad
        numel = grad.numel()
        fits = self.contiguous_gradients and bucket.elements + numel <= self.reduce_bucket_size
        if not fits or self.zenflow or bucket.buffer is None or grad.dtype != bucket.buffer.dtype:
            self._copy_collected()
            super()._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(param)
            return
        stream = get_accelerator().current_stream()
        self._collected.append(_Collected(param, bucket, bucket.elements, stream))
        self._collected_numel += numel
        bucket.params.append(param)
        bucket.process_group = self._get_param_partition_group(param)
        bucket.elements += numel
        if self._collected_numel >= min(COLLECTED_NUMEL, COLLECTED_SHARE * self.reduce_bucket_size):
            self._copy_collected()

    @uncompiled
    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(self, *args: Any) -> None:
        """DeepSpeed's reduction of a bucket."""
        self._copy_collected()
        super()._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(*args)

    def _copy_collected(self) -> None:
        """Copies the collected gradients to their places. After a backward pass that was interrupted, DeepSpeed takes
        gradients out of their buckets, which have no place any more, or later another one."""
        if not self._collected:
            return
        there = {id(param) for bucket in self.ipg_buckets.values() for param in bucket.params}
        last = {id(each.param): each for each in self._collected}
        collected = [each for key, each in last.items() if key in there and each.param.grad is not None]
        self._collected, self._collected_numel = [], 0
        if not collected:
            return
        accelerator = get_accelerator()
        if not accelerator.resolves_data_dependency():
            for stream in {each.stream for each in collected}:
                self.reduce_and_partition_stream.wait_stream(stream)
        grads = [each.param.grad for each in collected]
        with torch.no_grad(), accelerator.stream(self.reduce_and_partition_stream):
            places = [
                each.bucket.buffer.narrow(0, each.start, grad.numel()).view_as(grad)
                for each, grad in zip(collected, grads, strict=True)
            ]
            torch._foreach_copy_(places, grads, non_blocking=True)
            for grad, place in zip(grads, places, strict=True):
                if not accelerator.is_synchronized_device():
                    grad.record_stream(self.reduce_and_partition_stream)
                grad.data = place


# Norms


NORM_PART_NUMEL = 250_000_000
"""Elements above which DeepSpeed computes the norm of a gradient in parts."""


class GradientNorms:
    """Norms whose square and root, which DeepSpeed takes of each, follow for all of them at once."""

    def __init__(self) -> None:
        self._norms: dict[Any, torch.Tensor] = {}  # by parameter, on the compute device

    def add(self, key: Any, gradient: torch.Tensor) -> bool:
        """Computes the norm of a gradient. False for one whose norm DeepSpeed computes in parts: nothing has happened.

        Args:
            key: of its parameter.
            gradient: all of it.
        """
        if gradient.numel() > NORM_PART_NUMEL:
            return False
        self._norms[key] = gradient.view(-1).to(calls.norm_dtype()).norm(2)
        return True

    def complete(self) -> dict[Any, torch.Tensor]:
        """The norms that were added since the last call, by parameter, in host memory."""
        if not self._norms:
            return {}
        norms, self._norms = self._norms, {}
        values = torch.stack(list(norms.values())).cpu()
        return dict(zip(norms, ((values**2.0) ** 0.5).unbind(), strict=True))

    def clear(self) -> None:
        """Forgets them."""
        self._norms.clear()
