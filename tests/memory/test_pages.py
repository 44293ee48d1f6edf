# SPDX-License-Identifier: Apache-2.0
"""Locked-memory limits: what a process is allowed, and a refusal naming the remedies before anything is locked."""

from __future__ import annotations

import resource
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tencache_ds.errors import LockedMemoryError
from tencache_ds.memory import HostArena, Locking, locked_memory_headroom_nbytes
from tencache_ds.memory.pages import headroom_nbytes

pytestmark = pytest.mark.timeout(60)

STATUS = "Name:\tpython\nVmLck:\t    {locked_kb} kB\nCapEff:\t{capabilities:016x}\n"


@pytest.mark.parametrize(
    ("locked_kb", "capabilities", "limit_nbytes", "expected"),
    [
        (0, 0, 8 << 20, 8 << 20),
        (1024, 0, 8 << 20, 7 << 20),
        (9000, 0, 8 << 20, 0),
        (0, 1 << 14, 8 << 20, None),
        (0, ~(1 << 14) & 0x1FFFFFFFFFF, 8 << 20, 8 << 20),
        (512, 0, resource.RLIM_INFINITY, None),
    ],
)
def test_headroom(locked_kb: int, capabilities: int, limit_nbytes: int, expected: int | None) -> None:
    status = STATUS.format(locked_kb=locked_kb, capabilities=capabilities)
    assert headroom_nbytes(status, limit_nbytes) == expected


def test_headroom_of_this_process_is_sane() -> None:
    headroom = locked_memory_headroom_nbytes()
    assert headroom is None or headroom >= 0


UNPRIVILEGED = """
import os, resource, sys
from tencache_ds.errors import LockedMemoryError
from tencache_ds.memory import pages
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
if sys.argv[1] == "kernel":  # as in a user namespace: the capability is there but does not count
    pages.locked_memory_headroom_nbytes = lambda: None
else:
    assert pages.locked_memory_headroom_nbytes() == 4 << 20
pages.prove_lockable(2 << 20)
try:
    pages.prove_lockable(64 << 20)
except LockedMemoryError as error:
    print(error)
"""


@pytest.mark.parametrize("asked", ["limit", "kernel"])
def test_an_unprivileged_process_is_told_before_it_locks(asked: str) -> None:
    command = [sys.executable, "-c", UNPRIVILEGED, asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    for part in (str(64 << 20), str(4 << 20), "ulimit -l unlimited", "--ulimit memlock=-1", '"pin_memory": false'):
        assert part in done.stdout
    assert '"io_backend": "posix"' in done.stdout


class ScriptedPinHandle:
    """DeepSpeed's pin_handle, with memory of torch's own."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.out_of_memory = False

    def new_cpu_locked_tensor(self, num_elem: int, example: torch.Tensor) -> torch.Tensor:
        return example.new_empty(0 if self.out_of_memory else num_elem)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        self.freed.append(tensor.data_ptr())
        return True


@pytest.fixture
def pin_handle(monkeypatch: pytest.MonkeyPatch) -> ScriptedPinHandle:
    handle = ScriptedPinHandle()
    ops = ModuleType("tencache_ds.ops")
    async_io = ModuleType("tencache_ds.ops.async_io")
    async_io.load_pin_memory = lambda: SimpleNamespace(pin_handle=lambda: handle)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tencache_ds.ops", ops)
    monkeypatch.setitem(sys.modules, "tencache_ds.ops.async_io", async_io)
    monkeypatch.setattr("tencache_ds.memory.pages.locked_memory_headroom_nbytes", lambda: 1 << 20)
    return handle


def test_mlock_asks_for_headroom_first(pin_handle: ScriptedPinHandle) -> None:
    arena = HostArena(None, Locking.MLOCK)
    with pytest.raises(LockedMemoryError, match="1048576 bytes are left"):
        arena.allocate(2 << 20, "staging")
    assert arena.nbytes_in_use == 0
    tensor = arena.allocate(4096, "staging")
    address = tensor.data_ptr()
    assert arena.nbytes_locked == 4096
    arena.free(tensor)
    assert pin_handle.freed == [address]
    assert arena.nbytes_locked == 0


def test_mlock_without_memory_is_an_error(pin_handle: ScriptedPinHandle) -> None:
    pin_handle.out_of_memory = True
    with pytest.raises(LockedMemoryError, match="returned no memory"):
        HostArena(None, Locking.MLOCK).allocate(4096, "staging")


def test_deepspeed_recognises_its_locked_memory() -> None:
    from tencache_ds.ops.async_io import load_pin_memory

    arena = HostArena(1 << 20, Locking.MLOCK)
    tensor = arena.allocate(1 << 19, "staging")
    try:
        assert tensor.data_ptr() % 4096 == 0
        assert tensor.numel() == 1 << 19
        assert load_pin_memory().pin_handle().is_pinned(tensor[4096:8192])
        with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
            locked_kb = int(next(line for line in status if line.startswith("VmLck")).split()[1])
        assert locked_kb >= 512
    finally:
        arena.close()
