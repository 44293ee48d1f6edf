# SPDX-License-Identifier: Apache-2.0
"""The arena: exact sizes, the limit and its message, memory that really goes back to the system, as does pinned memory
of torch that nothing uses."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import psutil
import pytest
import torch

from tencache_ds.errors import LockedMemoryError, MemoryLimitError
from tencache_ds.memory import HostArena, Locking
from tencache_ds.memory.arena import POISON_BYTE, empty_pinned_cache, untouched_zeros
from tencache_ds.memory.pages import CudaPages

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


def resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def mapped_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 4096), (4096, 4096), (4097, 8192), (3 * MIB + 1, 3 * MIB + 4096)])
def test_memory_is_exact_and_page_aligned(nbytes: int, rounded: int) -> None:
    arena = HostArena(None, Locking.NONE)
    tensor = arena.allocate(nbytes, "staging")
    assert tensor.shape == (rounded,)
    assert tensor.dtype == torch.uint8
    assert tensor.data_ptr() % 4096 == 0
    assert tensor.sum() == 0
    tensor.fill_(7)
    assert int(tensor[-1]) == 7
    arena.close()


def test_large_blocks_start_on_a_huge_page_and_map_nothing_more() -> None:
    arena = HostArena(None, Locking.NONE)
    before = mapped_nbytes()
    tensor = arena.allocate(65 * MIB + 4096, "staging")
    assert tensor.data_ptr() % (2 * MIB) == 0
    assert mapped_nbytes() - before == 65 * MIB + 4096
    arena.free(tensor)
    assert mapped_nbytes() == before


def test_memory_that_is_left_goes_with_the_last_reference_to_it() -> None:
    arena = HostArena(8 * MIB, Locking.NONE)
    before = mapped_nbytes()
    tensor = arena.allocate(8 * MIB, "gradients")
    view = tensor[4096:8192].view(torch.float32)
    arena.leave(tensor)
    assert arena.nbytes_in_use == 0
    with pytest.raises(ValueError, match="freed before"):
        arena.leave(tensor)
    del tensor
    gc.collect()
    view.fill_(1)
    assert mapped_nbytes() - before == 8 * MIB
    del view
    gc.collect()
    assert mapped_nbytes() == before
    arena.free(arena.allocate(8 * MIB, "gradients"))
    arena.close()


def test_free_gives_the_memory_back_at_once() -> None:
    arena = HostArena(None, Locking.NONE)
    before = resident_nbytes()
    tensor = arena.allocate(64 * MIB, "staging")
    tensor.fill_(1)
    assert resident_nbytes() - before > 60 * MIB
    arena.free(tensor)  # although the tensor object is still alive
    assert resident_nbytes() - before < 4 * MIB
    assert arena.nbytes_in_use == 0
    assert arena.nbytes_peak == 64 * MIB


def test_limit_is_exact_and_its_error_names_everything() -> None:
    arena = HostArena(3 * 4096, Locking.NONE)
    first = arena.allocate(8000, "weights")
    with pytest.raises(MemoryLimitError) as caught:
        arena.allocate(4097, "optimizer staging")
    for part in ("optimizer staging", "needs 8192", "8192 of the limit of 12288", "tencache.staging_memory", "by 4096"):
        assert part in str(caught.value)
    second = arena.allocate(4096, "optimizer staging")
    assert arena.nbytes_in_use == 3 * 4096
    assert arena.by_purpose() == {"weights": 8192, "optimizer staging": 4096}
    arena.free(first)
    assert arena.by_purpose() == {"optimizer staging": 4096}
    arena.allocate(8192, "weights")
    arena.free(second)
    arena.close()
    assert arena.nbytes_in_use == 0
    assert arena.nbytes_peak == 3 * 4096


def test_what_the_system_refuses_is_an_error_and_not_counted() -> None:
    arena = HostArena(None, Locking.NONE)
    with pytest.raises(MemoryLimitError, match="cannot map"):
        arena.allocate(1 << 60, "staging")
    assert arena.nbytes_in_use == 0


def test_wrong_frees_are_errors() -> None:
    arena = HostArena(None, Locking.NONE)
    tensor = arena.allocate(8192, "staging")
    with pytest.raises(ValueError, match="view into a block"):
        arena.free(tensor[4096:])
    with pytest.raises(ValueError, match="not memory of the arena"):
        arena.free(torch.empty(8192, dtype=torch.uint8))
    arena.free(tensor)
    with pytest.raises(ValueError, match="freed before"):
        arena.free(tensor)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_allocations_are_errors(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HostArena(None, Locking.NONE).allocate(nbytes, "staging")


def test_negative_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="limit_nbytes"):
        HostArena(-1, Locking.NONE)


def test_what_is_kept_stays_mapped_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    arena = HostArena(None, Locking.NONE)
    kept, other = arena.allocate(8192, "staging"), arena.allocate(4096, "staging")
    for _ in range(2):
        arena.keep(kept, "layer.3")
    with pytest.raises(ValueError, match="not memory of the arena"):
        arena.keep(other[16:], "layer.3")
    arena.close()
    kept.fill_(1)
    assert arena.nbytes_in_use == 8192
    assert [message.split(";")[0] for message in caplog.messages] == [
        "8192 bytes of host memory stay mapped until the process ends: a device has not responded, and may still "
        "write to those of layer.3"
    ]
    before = mapped_nbytes()
    arena.free(kept)  # the request has ended after all
    assert before - mapped_nbytes() == 8192
    assert arena.nbytes_in_use == 0


def test_close_is_final_and_idempotent() -> None:
    arena = HostArena(None, Locking.NONE)
    arena.allocate(4096, "staging")
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.allocate(4096, "staging")


def test_poison_marks_fresh_and_freed_memory() -> None:
    arena = HostArena(8192, Locking.NONE, poison=True)
    tensor = arena.allocate(8192, "staging")
    assert bool((tensor == POISON_BYTE).all())
    tensor.zero_()
    arena.free(tensor)
    assert bool((tensor == POISON_BYTE).all())  # still mapped, so that a late reader is found out
    arena.free(arena.allocate(8192, "staging"))
    arena.close()


def test_memory_from_inference_mode_can_be_trained_on() -> None:
    arena = HostArena(None, Locking.NONE)
    with torch.inference_mode():
        tensor = arena.allocate(4096, "staging")
    assert not tensor.is_inference()
    arena.close()


FORK = """
import os
from tencache_ds.memory import HostArena, Locking

NBYTES = 96 << 20

def anonymous_nbytes(process):
    with open(f"/proc/{process}/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024

def in_child(arena, tensor, inherited):
    try:
        arena.allocate(1, "staging")
    except ValueError as error:
        if f"belongs to process {os.getppid()}" not in str(error):
            return 2
    else:
        return 3
    arena.free(tensor)
    arena.close()
    return 0 if not inherited or int(tensor[NBYTES // 2]) == 9 else 4

for locking, inherited in ((Locking.NONE, False), (Locking.MLOCK, False), (Locking.NONE, True)):
    arena = HostArena(None, locking, inherited=inherited)
    tensor = arena.allocate(NBYTES, "staging").fill_(9)
    wake, awake = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wake, 1)
        os._exit(in_child(arena, tensor, inherited))
    shared_nbytes = anonymous_nbytes(child) - (anonymous_nbytes("self") - NBYTES)
    os.write(awake, b"x")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, (locking, os.waitstatus_to_exitcode(status))
    assert bool((tensor == 9).all())
    arena.close()
    assert shared_nbytes > NBYTES // 2 if inherited else shared_nbytes < NBYTES // 16, (locking, shared_nbytes)
"""


def test_children_get_no_buffers_and_leave_the_parent_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_share_the_limit() -> None:
    arena = HostArena(16 * 4096, Locking.NONE)
    errors: list[BaseException] = []
    refusals = threading.Semaphore(0)

    def work(seed: int) -> None:
        try:
            for round_ in range(50):
                try:
                    tensor = arena.allocate(4096 * (1 + (seed + round_) % 4), f"thread {seed}")
                except MemoryLimitError:
                    refusals.release()
                    continue
                tensor.fill_(seed)
                if not bool((tensor == seed).all()):
                    raise ValueError("another thread wrote here")
                arena.free(tensor)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert arena.nbytes_in_use == 0
    assert 4096 <= arena.nbytes_peak <= 16 * 4096
    arena.close()


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LockedMemoryError, match="no CUDA device"):
        HostArena(None, Locking.CUDA)


class ScriptedCudart:
    """The runtime calls the arena makes, with results that the test chooses."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.register_result = 0
        self.unregister_result = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.register_result == 0:
            self.registered[address] = nbytes
        return self.register_result

    def cudaHostUnregister(self, address: int) -> int:
        if self.unregister_result == 0:
            del self.registered[address]
        return self.unregister_result

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> ScriptedCudart:
    scripted = ScriptedCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: scripted)
    monkeypatch.setattr(CudaPages, "_forget_error", lambda self: None)  # launches a kernel
    return scripted


def test_cuda_memory_is_registered_and_unregistered_exactly(cudart: ScriptedCudart) -> None:
    arena = HostArena(None, Locking.CUDA)
    tensor = arena.allocate(5000, "staging")
    assert cudart.registered == {tensor.data_ptr(): 8192}
    assert arena.nbytes_locked == 8192
    arena.free(tensor)
    arena.allocate(4096, "staging")
    assert len(cudart.registered) == 1
    arena.close()
    assert cudart.registered == {}


def test_a_refused_registration_leaves_nothing_behind(cudart: ScriptedCudart) -> None:
    arena = HostArena(None, Locking.CUDA)
    before = mapped_nbytes()
    cudart.register_result = 2
    with pytest.raises(LockedMemoryError, match=r"cudaHostRegister of 67108864 bytes failed: error 2.*pin_memory"):
        arena.allocate(64 * MIB, "staging")
    assert mapped_nbytes() == before
    assert arena.nbytes_in_use == 0


def test_memory_the_driver_keeps_stays_mapped(cudart: ScriptedCudart) -> None:
    arena = HostArena(None, Locking.CUDA)
    tensor = arena.allocate(4096, "staging")
    cudart.unregister_result = 700
    with pytest.raises(LockedMemoryError, match="stays mapped"):
        arena.free(tensor)
    assert arena.nbytes_in_use == 4096
    assert int(tensor.sum()) == 0
    cudart.unregister_result = 4  # the driver has shut down: nothing is registered any more
    arena.free(tensor)
    assert arena.nbytes_in_use == 0


def test_close_tries_everything_and_then_raises(cudart: ScriptedCudart) -> None:
    arena = HostArena(None, Locking.CUDA)
    arena.allocate(4096, "staging")
    arena.allocate(4096, "staging")
    cudart.unregister_result = 700
    with pytest.raises(LockedMemoryError, match="error 700"):
        arena.close()
    arena.close()


def test_disowned_memory_goes_with_the_last_tensor_that_looks_at_it():
    arena = HostArena(None, Locking.NONE)
    views = [arena.allocate(256 << 20, "weights")[4096:8192].fill_(number) for number in range(2)]
    mapped_mib = address_space_mib()
    arena.disown()
    arena.disown()
    assert arena.nbytes_in_use == 0
    with pytest.raises(ValueError, match="closed"):
        arena.allocate(1, "more")
    assert [bool((view == number).all()) for number, view in enumerate(views)] == [True, True]
    kept = views.pop().view(torch.int32)[5:]
    assert address_space_mib() == pytest.approx(mapped_mib, abs=100)
    del kept
    assert address_space_mib() == pytest.approx(mapped_mib - 256, abs=100)
    views.clear()
    assert address_space_mib() == pytest.approx(mapped_mib - 512, abs=100)


def address_space_mib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * 4096 >> 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 1000, 3 * 2**20])
def test_untouched_zeros_live_as_long_as_anybody_looks(numel, dtype):
    before = resident_nbytes()
    whole = untouched_zeros(numel, dtype)
    assert whole.shape == (numel,)
    assert resident_nbytes() - before < max(whole.nbytes // 2, 2**20), "no page was touched"
    part = whole[numel // 2 :]
    del whole
    gc.collect()
    assert not part.any()
    part.fill_(1.0)
    assert bool((part == 1.0).all())


def test_untouched_zeros_go_back():
    before = resident_nbytes()
    for _ in range(8):
        untouched_zeros(8 * 2**20, torch.float32).fill_(1.0)
    gc.collect()
    assert resident_nbytes() - before < 40 * 2**20


NBYTES = 640 << 20  # for which torch pins a GiB


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_memory_of_tensors_that_are_gone_goes_back() -> None:
    process = psutil.Process()
    torch.ones(1, device="cuda")
    empty_pinned_cache()
    before = process.memory_info().rss
    tensor = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    kept = torch.full((4096,), 7, dtype=torch.uint8).pin_memory()
    del tensor
    held = process.memory_info().rss
    empty_pinned_cache()
    assert held - before >= NBYTES
    assert process.memory_info().rss - before < NBYTES // 4
    assert kept.eq(7).all()


def test_without_a_gpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: pytest.fail("there is no such cache"), raising=False)
    empty_pinned_cache()


def test_builds_of_torch_that_cannot_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    empty_pinned_cache()
