# SPDX-License-Identifier: Apache-2.0
"""What samples tell, and the device itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tencache_ds.profiling.waits import CudaIdle, IdleSamples, SynchronousIdle

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
    idle = CudaIdle(60.0)
    assert idle.seconds(0.0, 1.0) == 0.0
    idle.close()


DRIVER = """
#include <unistd.h>
static volatile int calls, unloaded;
int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return 0; }
int cuStreamQuery(void *stream) { if (unloaded) _exit(42); ++calls; return 0; }
int n_calls(void) { return calls; }
__attribute__((destructor)) static void unload(void) { unloaded = 1; usleep(200000); }
"""
SCRIPT = """
import ctypes, sys, time, types
import torch
from tencache_ds.profiling import waits
driver = ctypes.CDLL(sys.argv[1])
ctypes.CDLL = lambda name: driver
torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=0)
def asked_no_more():
    n = driver.n_calls()
    time.sleep(0.05)
    assert driver.n_calls() == n
{}
sys.exit(0 if driver.n_calls() > 10 else 1)
"""
ENDINGS = {
    # The references that native code keeps, hooks of autograd for one, outlive the interpreter.
    "in_an_observed_step": "idle = waits.CudaIdle(60.0); time.sleep(0.1); "
    "ctypes.pythonapi.Py_IncRef(ctypes.py_object(idle))",
    "after_its_time": "idle = waits.CudaIdle(0.1); time.sleep(0.3); asked_no_more()",
    "closed": "idle = waits.CudaIdle(60.0); time.sleep(0.1); idle.close(); asked_no_more()",
    "dropped": "idle = waits.CudaIdle(60.0); time.sleep(0.1); del idle; asked_no_more()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_driver_is_not_asked_any_more(tmp_path: Path, ending: str) -> None:
    """Not while a process exits either, when the driver is unloaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "without a C compiler DeepSpeed's operators could not have been built either"
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "driver.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    script = SCRIPT.format(ENDINGS[ending])
    done = subprocess.run([sys.executable, "-c", script, library], timeout=50, check=False)
    assert done.returncode == 0


@pytest.mark.gpu
def test_a_gpu_is_idle_while_it_has_nothing_to_do():
    matrix = torch.randn(4096, 4096, device="cuda")
    (matrix @ matrix).sum().item()
    idle = CudaIdle(60.0)
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
    idle = CudaIdle(60.0)
    with torch.cuda.graph(graph, stream=stream):
        result = matrix @ matrix
        time.sleep(0.02)
    idle.close()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(result, matrix @ matrix, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_a_step_of_the_default_stream_is_seen_from_another_thread():
    idle = CudaIdle(60.0)
    t_start_s = time.perf_counter()
    torch.cuda.synchronize()
    time.sleep(0.05)
    assert idle.seconds(t_start_s, time.perf_counter()) > 0.04
