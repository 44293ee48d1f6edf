# SPDX-License-Identifier: Apache-2.0
"""What samples tell, and the device itself."""

from __future__ import annotations

import time

import pytest
import torch

from tencache_ds.profiling.device_idle import CudaIdle, IdleSamples, SynchronousIdle

pytestmark = pytest.mark.timeout(60)

NOT_READY = 600  # CUDA_ERROR_NOT_READY


def samples(*results: int) -> IdleSamples:
    """One each millisecond, from 1 s on."""
    return IdleSamples([1_000_000_000 + 1_000_000 * index for index in range(len(results))], list(results))


def test_the_share_of_samples_is_the_share_of_the_time():
    idle = samples(*[0] * 50, *[NOT_READY] * 30, *[0] * 20)
    assert idle.seconds(1.0, 1.05) == pytest.approx(0.05)
    assert idle.seconds(1.05, 1.08) == pytest.approx(0.0)
    assert idle.seconds(1.04, 1.06) == pytest.approx(0.01)
    assert idle.seconds(1.0, 1.1) == pytest.approx(0.07)


def test_where_there_are_few_samples_all_of_them_count():
    idle = samples(*[0] * 30, *[NOT_READY] * 10)
    assert idle.seconds(1.001, 1.003) == pytest.approx(0.0015)
    assert idle.seconds(7.0, 8.0) == pytest.approx(0.75)


def test_without_samples_nothing_is_known():
    assert samples().seconds(0.0, 1.0) == 0.0


def test_a_driver_that_gives_errors_says_nothing_of_idle_time():
    assert samples(*[700] * 100).seconds(1.0, 1.1) == 0.0


def test_a_synchronous_device_waits_for_all_that_the_host_does():
    idle = SynchronousIdle()
    assert idle.seconds(2.0, 2.5) == 0.5
    idle.close()


@pytest.mark.parametrize("error", [OSError("no such library"), RuntimeError("Resource temporarily unavailable")])
def test_training_goes_on_where_nothing_can_be_observed(monkeypatch, error):
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr("ctypes.CDLL", refuse)
    idle = CudaIdle()
    assert idle.seconds(0.0, 1.0) == 0.0
    idle.close()


@pytest.mark.gpu
def test_a_gpu_is_idle_while_it_has_nothing_to_do():
    matrix = torch.randn(4096, 4096, device="cuda")
    (matrix @ matrix).sum().item()
    idle = CudaIdle()
    t_start_s = time.perf_counter()
    time.sleep(0.2)
    t_busy_s = time.perf_counter()
    for _ in range(100):
        matrix @ matrix
    torch.cuda.synchronize()
    t_idle_s = time.perf_counter()
    time.sleep(0.1)
    t_end_s = time.perf_counter()
    idle.close()
    assert idle.seconds(t_start_s, t_busy_s) == pytest.approx(t_busy_s - t_start_s, rel=0.05)
    assert idle.seconds(t_busy_s, t_idle_s) < 0.1 * (t_idle_s - t_busy_s)
    assert idle.seconds(t_idle_s, t_end_s) == pytest.approx(t_end_s - t_idle_s, rel=0.1)


@pytest.mark.gpu
def test_queries_break_no_capture_of_a_graph():
    """Which a user's code may do in a step that is observed. torch captures on a stream of its own."""
    matrix, graph, stream = torch.randn(256, 256, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (matrix @ matrix).sum().item()
    idle = CudaIdle()
    with torch.cuda.graph(graph, stream=stream):
        result = matrix @ matrix
        time.sleep(0.02)
    idle.close()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(result, matrix @ matrix, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_a_step_of_the_default_stream_is_seen_from_another_thread():
    idle = CudaIdle()
    t_start_s = time.perf_counter()
    torch.cuda.synchronize()
    time.sleep(0.05)
    assert idle.seconds(t_start_s, time.perf_counter()) > 0.04
