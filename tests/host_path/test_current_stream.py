# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's accelerator asks for the current stream and changes it as torch does, in less time."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tencache_ds.host_path import launches as quick

OF_TORCH = object()


class Cuda:
    """The functions behind ``torch.cuda``, for two devices whose current streams are numbers."""

    def __init__(self) -> None:
        self.device = 0
        self.current = {0: 0, 1: 0}
        self.of_torch: list[str] = []

    def get(self, device: int) -> tuple[int, int, int]:
        return self.current[device], device, 1

    def set(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        assert device_type == 1
        self.current[device_index] = stream_id

    def stream_of_torch(self, stream: Any) -> Any:
        self.of_torch.append(stream)
        return mock.MagicMock()


def stream(number: int, device: int = 0) -> Any:
    return SimpleNamespace(stream_id=number, device_index=device, device_type=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: cuda.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", cuda.get, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", cuda.set, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream_of_torch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: OF_TORCH)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **numbers: numbers)
    return cuda


def test_the_methods_of_the_accelerator_are_replaced_once(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(device_name=lambda: "cuda", current_stream="before", stream="before")
    monkeypatch.setattr(quick, "get_accelerator", lambda: accelerator)
    for _ in range(2):
        quick.ask_for_streams_quickly()
        assert (accelerator.current_stream, accelerator.stream) == (quick.current_stream, quick.stream)
        assert accelerator.tencache_original_streams == ("before", "before")


def test_other_accelerators_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(device_name=lambda: "xpu", current_stream="before", stream="before")
    monkeypatch.setattr(quick, "get_accelerator", lambda: accelerator)
    quick.ask_for_streams_quickly()
    assert (accelerator.current_stream, accelerator.stream) == ("before", "before")


def test_the_current_stream_is_that_of_the_current_device(cuda: Cuda) -> None:
    cuda.current, cuda.device = {0: 7, 1: 9}, 1
    assert quick.current_stream() == {"stream_id": 9, "device_index": 1, "device_type": 1}
    assert quick.current_stream(0) is OF_TORCH
    with mock.patch.object(torch.cuda, "is_initialized", return_value=False):
        assert quick.current_stream() is OF_TORCH


def test_a_stream_is_current_within_its_block_only(cuda: Cuda) -> None:
    cuda.current[0] = 3
    with quick.stream(stream(5)):
        assert cuda.current[0] == 5
        with contextlib.suppress(KeyError), quick.stream(stream(6)):
            assert cuda.current[0] == 6
            raise KeyError
        with quick.stream(None):
            assert cuda.current[0] == 5
        assert cuda.current[0] == 5
    assert cuda.current == {0: 3, 1: 0}


def test_a_stream_of_another_device_is_left_to_torch(cuda: Cuda) -> None:
    other = stream(5, device=1)
    with quick.stream(other):
        assert cuda.current == {0: 0, 1: 0}
    assert cuda.of_torch == [other]


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_torch_says() -> None:
    torch.cuda.init()
    quick.ask_for_streams_quickly()
    accelerator, side, other = get_accelerator(), torch.cuda.Stream(), torch.cuda.Stream()
    before = torch.cuda.current_stream()
    assert accelerator.current_stream() == before
    values = torch.zeros(1 << 20, device="cuda")
    with accelerator.stream(side):
        assert accelerator.current_stream() == torch.cuda.current_stream() == side
        with accelerator.stream(other), torch.cuda.stream(side), accelerator.stream(None):
            assert accelerator.current_stream() == torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == side
        accelerator.current_stream().wait_stream(before)
        values += 1
        event = accelerator.Event()
        event.record(accelerator.current_stream())
    assert accelerator.current_stream() == torch.cuda.current_stream() == before
    accelerator.current_stream().wait_event(event)
    assert float(values.sum()) == values.numel()


@pytest.mark.multigpu
def test_on_two_gpus_it_is_that_of_the_current_one() -> None:
    quick.ask_for_streams_quickly()
    accelerator, side = get_accelerator(), torch.cuda.Stream(device=1)
    with torch.cuda.device(1):
        assert accelerator.current_stream().device_index == 1
    with accelerator.stream(side):  # switches to the stream's device, as torch's own does
        assert accelerator.current_stream() == torch.cuda.current_stream() == torch.cuda.current_stream(1) == side
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_stream(1) != side
    assert accelerator.current_stream() == torch.cuda.current_stream()
    assert torch.cuda.current_device() == 0
