# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures with: the storage meter on DeepSpeed's own handle, and the parsers of kernel files."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.training import consumption, instruments
from benchmarks.training.consumption import CpuEnergy
from benchmarks.training.device_profile import busy_s, parse_trace
from benchmarks.training.storage_meter import StorageMeter, on_training_thread
from benchmarks.training.timeline import Timeline
from tencache_ds.io import BACKENDS, GdsBackend, NativeBackend, Submission
from tencache_ds.io.backends.posix import PosixFiles
from tests.io.conftest import aligned
from tests.io.device_files import new_kind

pytestmark = pytest.mark.timeout(300)

NBYTES = 1 << 20


@pytest.fixture(scope="module")
def op() -> ModuleType:
    from tencache_ds.ops.async_io import load_async_io

    return load_async_io()


@pytest.fixture
def meter(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> StorageMeter:
    for owner, name in (
        (op, "aio_handle"),
        (PosixFiles, "transfer"),
        (NativeBackend, "submit"),
        (GdsBackend, "submit"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # puts back what the meter replaces
    metered = StorageMeter()
    metered.meter_handles(op)
    return metered


@pytest.fixture
def handle(op: ModuleType, meter: StorageMeter) -> Any:
    return op.aio_handle(block_size=1 << 18, queue_depth=4, single_submit=False, overlap_events=True)


def pattern() -> torch.Tensor:
    return torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8)


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_counts_what_stock_does_with_a_handle(handle: Any, meter: StorageMeter, tmp_path: Path) -> None:
    path, data, back = str(tmp_path / "swap"), pattern(), torch.zeros(NBYTES, dtype=torch.uint8)
    assert handle.async_pwrite(data, path, 0) == 0
    assert handle.wait() == 1
    assert handle.async_pread(back, path, 0) == 0
    assert handle.wait() == 1
    assert torch.equal(back, data)
    counts = meter.counts()
    assert (counts.read_nbytes, counts.write_nbytes) == (NBYTES, NBYTES)
    assert counts.wait_ns > 0


def test_counts_every_kind_of_transfer(handle: Any, meter: StorageMeter, tmp_path: Path) -> None:
    path, data = str(tmp_path / "swap"), pattern()
    half = data[: NBYTES // 2]
    assert handle.sync_pwrite(data, path) == 1
    assert handle.pwrite(buffer=data, filename=path, validate=False, **{"async": False}) == 1
    assert handle.write(data, path, False) == 0
    assert meter.counts().write_nbytes == 3 * NBYTES
    assert handle.sync_pread(half, path, NBYTES // 2) == 1
    assert handle.pread(half, path, False, True, 0) == 0
    assert handle.wait() == 1
    assert handle.read(data, path, False) == 0
    assert meter.counts().read_nbytes == 2 * NBYTES


def test_a_metered_handle_is_still_a_handle(handle: Any, op: ModuleType, meter: StorageMeter) -> None:
    assert handle.get_block_size() == 1 << 18
    locked = handle.new_cpu_locked_tensor(NBYTES, torch.empty(0, dtype=torch.uint8))
    assert handle.is_pinned(locked)
    assert handle.free_cpu_locked_tensor(locked)
    assert type(handle) is op.aio_handle
    assert type(handle).__base__.__name__ == "aio_handle"


def test_time_in_lanes_is_no_wait_of_the_training(handle: Any, meter: StorageMeter, tmp_path: Path) -> None:
    in_thread(lambda: handle.sync_pwrite(pattern(), str(tmp_path / "swap")))
    assert meter.counts().write_nbytes == NBYTES
    assert meter.counts().wait_ns == 0


def test_which_threads_train() -> None:
    found: dict[str, bool] = {"main": on_training_thread()}
    in_thread(lambda: found.update(lane=on_training_thread()))
    done = threading.Event()

    def foreign() -> None:
        found["autograd"] = on_training_thread()
        done.set()

    _thread.start_new_thread(foreign, ())  # as one that C++ started: Python's threading does not know it
    assert done.wait(10)
    assert found == {"main": True, "lane": False, "autograd": True}


def test_other_threads_run_while_a_metered_call_waits(handle: Any, tmp_path: Path) -> None:
    path, data = str(tmp_path / "swap"), torch.zeros(64 << 20, dtype=torch.uint8)
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        handle.sync_pwrite(data[: 1 << 12].clone(), path)  # the op's warning at its first write holds the GIL
        t_start = time.perf_counter()
        handle.sync_pwrite(data, path)
        t_end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert sum(t_start < t < t_end for t in ticks) >= 3


def test_a_metered_call_costs_microseconds(op: ModuleType, meter: StorageMeter) -> None:
    t_start = time.perf_counter()
    for _ in range(1000):
        on_training_thread()
        meter.add(read_nbytes=1, wait_ns=1)
    assert (time.perf_counter() - t_start) / 1000 < 100e-6


def test_an_unknown_handle_is_refused() -> None:
    module = ModuleType("async_io")
    module.aio_handle = type("aio_handle", (), {"wait": lambda handle: 0})  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="aio_handle has no read, pread"):
        StorageMeter().meter_handles(module)


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_what_tencache_moves(backend: str, handle: Any, meter: StorageMeter, tmp_path: Path) -> None:
    from tencache_ds.io import BackendSettings, ExtentStore, open_backend

    meter.meter_files(PosixFiles)
    meter.meter_requests(NativeBackend)
    storage = open_backend(backend, BackendSettings(buffers_are_pinned=True, n_lanes=2))[0]
    store = ExtentStore(str(tmp_path / "store"), storage, growth_nbytes=NBYTES)
    extent = store.allocate(NBYTES, "data")
    locked = handle.new_cpu_locked_tensor(NBYTES, torch.empty(0, dtype=torch.uint8))  # what aio takes as it is
    store.write(extent, locked).wait()
    store.read(extent, locked).wait()
    counts = meter.counts()
    store.close()
    storage.close()
    handle.free_cpu_locked_tensor(locked)
    assert (counts.read_nbytes, counts.write_nbytes, counts.wait_ns) == (NBYTES, NBYTES, 0)


def test_counts_what_gds_moves(meter: StorageMeter, tmp_path: Path) -> None:
    from tencache_ds.io import Operation

    path = tmp_path / "data"
    path.write_bytes(bytes(NBYTES))
    meter.meter_requests(GdsBackend)
    buffer = aligned(NBYTES)
    with new_kind() as open_file:
        backend = GdsBackend(torch.device("cpu"), n_lanes=2, open_file=open_file)
        backend.submit(Submission(Operation.WRITE, str(path), 0, buffer)).wait(10)
        backend.submit(Submission(Operation.READ, str(path), 0, buffer)).wait(10)
        backend.close()
    counts = meter.counts()
    assert (counts.read_nbytes, counts.write_nbytes, counts.wait_ns) == (NBYTES, NBYTES, 0)


def test_timeline_starts_at_nothing_and_grows() -> None:
    meter = StorageMeter()
    meter.add(read_nbytes=1000)
    timeline = Timeline(meter, hz=200, further_rss_nbytes=lambda: 5)
    with timeline.span():
        meter.add(read_nbytes=7, write_nbytes=3)
        time.sleep(0.05)
    samples = list(timeline.samples)
    time.sleep(0.05)
    assert timeline.samples == samples
    assert (samples[0].nvme_read_nbytes, samples[0].nvme_write_nbytes) == (0, 0)
    assert (samples[-1].nvme_read_nbytes, samples[-1].nvme_write_nbytes) == (7, 3)
    assert len(samples) >= 3
    assert [sample.t_s for sample in samples] == sorted(sample.t_s for sample in samples)
    assert samples[0].rss_nbytes > 10 << 20


def test_a_timeline_leaves_out_what_was_between_its_spans() -> None:
    meter = StorageMeter()
    timeline = Timeline(meter, hz=200)
    with timeline.span():
        meter.add(read_nbytes=7, write_nbytes=3)
    first = list(timeline.samples)
    meter.add(read_nbytes=1000, write_nbytes=1000)
    time.sleep(0.5)
    with timeline.span():
        meter.add(read_nbytes=1, write_nbytes=2)
        time.sleep(0.05)
    samples = timeline.samples
    assert samples[: len(first)] == first
    assert (samples[-1].nvme_read_nbytes, samples[-1].nvme_write_nbytes) == (8, 5)
    assert [sample.t_s for sample in samples] == sorted(sample.t_s for sample in samples)
    assert samples[len(first)].t_s - first[-1].t_s < 0.4


def test_consumption_is_summed_over_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = iter(range(0, 1000, 100))
    unreadable = SimpleNamespace(joules=lambda: None, nbytes=lambda: None)
    monkeypatch.setattr(consumption, "gpu_joules", lambda: next(counter))
    monkeypatch.setattr(consumption, "CpuEnergy", lambda: unreadable)
    monkeypatch.setattr(consumption, "DiskWrites", lambda paths: unreadable)
    consumed = consumption.Consumption([str(tmp_path)])
    for _ in range(2):
        with consumed.span():
            consumed.counts()
        next(counter)  # between the spans
    assert consumed.spent == {"gpu_energy_j": 400, "cpu_energy_j": None, "disk_write_nbytes": None}


def test_no_timeline_at_zero_hertz() -> None:
    timeline = Timeline(StorageMeter(), hz=0)
    with timeline.span():
        pass
    assert timeline.samples == []


def test_bytes_of_this_process_are_those_of_the_kernel(tmp_path: Path) -> None:
    def by_kernel() -> tuple[int, int]:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"]), int(lines["write_bytes"])

    before = by_kernel()
    with (tmp_path / "data").open("wb") as file:
        file.write(bytes(NBYTES))
        os.fsync(file.fileno())
    found = instruments.process_io()
    assert all(a <= b <= c for a, b, c in zip(before, found, by_kernel(), strict=True))


def test_resident_memory() -> None:
    before = instruments.rss_nbytes(), instruments.host_used_nbytes()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert instruments.rss_nbytes() > before[0] + held.nbytes // 2
    assert instruments.process_nbytes("VmHWM") >= instruments.rss_nbytes() - held.nbytes // 2
    assert instruments.process_nbytes("NoSuchKey") == 0
    assert instruments.host_used_nbytes() > held.nbytes


def test_memory_of_children_is_their_own() -> None:
    before = instruments.children_nbytes()
    program = f"held = b'x' * {32 * NBYTES}; print(len(held), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == f"{32 * NBYTES}\n"
    assert 32 * NBYTES < instruments.children_nbytes() - before < 64 * NBYTES
    child.communicate("\n")
    assert child.returncode == 0


def powercap(root: Path, name: str, kind: str, energy: int, range_: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "name").write_text(f"{kind}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder / "energy_uj"


def test_cpu_energy_adds_packages_and_wraps_around(tmp_path: Path) -> None:
    first = powercap(tmp_path, "intel-rapl:0", "package-0", 900_000)
    second = powercap(tmp_path, "intel-rapl:1", "package-1", 100_000)
    inner = powercap(tmp_path, "intel-rapl:0:0", "core", 0)
    whole = powercap(tmp_path, "intel-rapl:2", "psys", 0)
    meter = CpuEnergy(tmp_path)
    for counter in (first, second, inner, whole):
        counter.write_text("400000\n")
    assert meter.joules() == pytest.approx(0.5 + 0.3)
    first.write_text("300000\n")  # around a second time
    assert meter.joules() == pytest.approx(0.5 + 0.3 + 0.9)


def test_without_rapl_there_is_no_cpu_energy(tmp_path: Path) -> None:
    assert CpuEnergy(tmp_path).joules() is None
    assert CpuEnergy(tmp_path / "missing").joules() is None


def test_busy_time_is_the_union_of_intervals() -> None:
    assert busy_s([]) == 0
    assert busy_s([(0, 10), (5, 10), (30, 5), (31, 2)]) == pytest.approx(20e-6)


def event(category: str, name: str, start: float, duration: float, device: int = 0, nbytes: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration,
            "args": {"device": device, "stream": 7, "bytes": nbytes}}  # fmt: skip


def test_device_trace() -> None:
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 0, "dur": 99, "args": {}},
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 100, nbytes=1000),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 50, 100, nbytes=500),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 10, nbytes=70),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 10, nbytes=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 100, device=1, nbytes=9),
        event("kernel", "sgemm", 200, 50),
    ]
    found = parse_trace(events, 0.5, 0)
    assert found is not None
    assert found.model_dump() == pytest.approx(
        {"seconds": 0.5, "h2d_nbytes": 1500, "d2h_nbytes": 70, "h2d_busy_s": 150e-6, "d2h_busy_s": 10e-6,
         "kernel_busy_s": 50e-6}
    )  # fmt: skip
    assert parse_trace(events[:2], 0.5, 0) is None
