# SPDX-License-Identifier: Apache-2.0
"""Gradients that are collected are in their places when DeepSpeed reduces a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3, IPGBucketZ3
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.host_path import HostPath
from tencache_ds.host_path import gradients as module
from tencache_ds.host_path.gradients import GradientBucketsMixin

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", autouse=True)
def whole_bucket() -> Iterator[None]:
    """As much may be collected as there is room for in the small bucket of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COLLECTED_SHARE", 1.0)
        yield


_PRIVATE = "_DeepSpeedZeroOptimizer_Stage3__"
BUCKET_NUMEL = 64


class Reduction:
    """In place of DeepSpeed's optimizer: its own addition to a bucket, and a reduction that looks at the gradients."""

    dp_process_group = "all"
    zenflow = False
    host_path = HostPath(buckets=True)

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = get_accelerator().current_device_name()
        self.reduce_bucket_size, self.contiguous_gradients = BUCKET_NUMEL, True
        self.ipg_buckets = {dtype: IPGBucketZ3()}
        self.bucket = self.ipg_buckets[dtype]
        self.bucket.buffer = torch.full((BUCKET_NUMEL,), torch.nan, dtype=dtype, device=self.device)
        self.reduce_and_partition_stream = (
            None if get_accelerator().is_synchronized_device() else get_accelerator().Stream()
        )
        self.reduced: list[tuple[int, list[float], bool]] = []
        self._collected: list[Any] = []

    def get_param_comm_dtype(self, param: Any) -> torch.dtype:
        return next(iter(self.ipg_buckets))

    def _get_param_partition_group(self, param: Any) -> Any:
        return self.dp_process_group

    _DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket = (
        DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket
    )

    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(self, communication_data_type: Any) -> None:
        if self.reduce_and_partition_stream is not None:
            self.reduce_and_partition_stream.synchronize()
        start, end = self.bucket.buffer.data_ptr(), self.bucket.buffer.data_ptr() + self.bucket.buffer.nbytes
        for param in self.bucket.params:
            in_bucket = start <= param.grad.data_ptr() < end
            self.reduced.append((param.key, param.grad.flatten().tolist(), in_bucket))
            param.grad = None
        self.bucket.clear_params()

    def backward(self, params: list[Any], gradients: list[torch.Tensor]) -> None:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
            if self.bucket.elements + param.numel() > BUCKET_NUMEL and self.bucket.elements:
                getattr(self, f"{_PRIVATE}reduce_and_partition_ipg_grads")(self.bucket.buffer.dtype)
            getattr(self, f"{_PRIVATE}add_grad_to_ipg_bucket")(param)

    def end(self) -> None:
        getattr(self, f"{_PRIVATE}reduce_and_partition_ipg_grads")(self.bucket.buffer.dtype)


class Collecting(GradientBucketsMixin, Reduction):
    """With ours."""


def make_params(shapes: list[tuple[int, int]], dtype: torch.dtype, device: str) -> list[Any]:
    params: list[Any] = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
    for key, param in enumerate(params):
        param.key, param.ds_shape = key, param.shape
    return params


SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    shapes=SHAPES,
    collected=st.sampled_from([1, 20, 50, 10**6]),
    transposed=st.booleans(),
    other_dtype=st.booleans(),
    interrupted=st.lists(st.integers(0, 12), max_size=2),
)
def test_the_same_gradients_are_reduced(
    shapes: Any, collected: int, transposed: bool, other_dtype: bool, interrupted: list[int]
) -> None:
    outcomes = []
    for kind in (Reduction, Collecting):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "COLLECTED_NUMEL", collected)
            optimizer = kind(torch.bfloat16)
            params = make_params(shapes, torch.float32 if other_dtype else torch.bfloat16, optimizer.device)
            order = torch.Generator().manual_seed(1)
            for n_backward, is_last in [*((each, False) for each in interrupted), (len(params), True)]:
                gradients = [torch.randn(param.shape, generator=order).to(param) for param in params]
                if transposed:
                    gradients = [gradient.t().contiguous().t() for gradient in gradients]
                optimizer.backward(params[:n_backward], gradients[:n_backward])
                if not is_last:  # what DeepSpeed does at the next step
                    optimizer.bucket.clear_params()
                    order.manual_seed(1)
            optimizer.end()
            outcomes.append(optimizer.reduced)
    assert outcomes[0] == outcomes[1]
    assert [key for key, _, _ in outcomes[1][-len(shapes) :]] == list(range(len(shapes)))


def test_gradients_are_copied_together() -> None:
    optimizer = Collecting(torch.bfloat16)
    params = make_params([(2, 3)] * 4, torch.bfloat16, optimizer.device)
    optimizer.backward(params, [torch.ones_like(param) for param in params])
    assert optimizer.bucket.elements == 24
    assert optimizer.bucket.buffer.isnan().all()
    optimizer.end()
    assert [key for key, _, _ in optimizer.reduced] == [0, 1, 2, 3]
    assert not optimizer.bucket.buffer[:24].isnan().any()


@pytest.mark.parametrize(("most", "share"), [(12, 1.0), (10**6, 12 / BUCKET_NUMEL)])
def test_no_more_than_a_bound_is_collected(monkeypatch: pytest.MonkeyPatch, most: int, share: float) -> None:
    monkeypatch.setattr(module, "COLLECTED_NUMEL", most)
    monkeypatch.setattr(module, "COLLECTED_SHARE", share)
    optimizer = Collecting(torch.bfloat16)
    params = make_params([(2, 3)] * 4, torch.bfloat16, optimizer.device)
    optimizer.backward(params[:3], [torch.ones_like(param) for param in params[:3]])
    if optimizer.reduce_and_partition_stream is not None:
        optimizer.reduce_and_partition_stream.synchronize()
    assert optimizer.bucket.buffer[:18].isnan().tolist() == [False] * 12 + [True] * 6
