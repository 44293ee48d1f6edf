# SPDX-License-Identifier: Apache-2.0
"""Activations on a GPU, whose streams are made to run far apart: the same gradients, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tencache_ds.activations.blocks import MovedTensor
from tencache_ds.activations.copies import CudaCopies, HostBuffers
from tencache_ds.activations.saved_tensors import SavedTensors
from tencache_ds.io import ExtentStore
from tencache_ds.io.backends.posix import PosixBackend
from tencache_ds.memory import HostArena, Locking
from tencache_ds.observability.counters import Counters

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

APART_CYCLES = 4_000_000
"""Cycles of the GPU's clock: about 2 ms, a hundred times the copy of a block here."""

STEPS = 4


class Apart(CudaCopies):
    """Copies that begin late, or compute work that does.

    Args:
        device: of the tensors.
        late: ``"out"``, ``"back"``, ``"compute"`` or ``""``.
        waits: whether streams wait for copies at all: without, results have to differ.
    """

    def __init__(self, device: torch.device, late: str, waits: bool = True) -> None:
        super().__init__(device)
        self._late, self._waits = late, waits

    def out(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        if self._late == "out":
            self._delay(self._out)
        event = super().out(target, source)
        if self._late == "compute":
            self._delay(torch.cuda.current_stream())
        return event

    def back(self, source: torch.Tensor, after: Any) -> Any:
        if self._late == "back":
            self._delay(self._back)
        found = super().back(source, after)
        if self._late == "compute":
            self._delay(torch.cuda.current_stream())
        return found

    def wait(self, event: Any) -> None:
        if self._waits:
            super().wait(event)

    def rates(self) -> None:
        """Unknown: everything moves."""
        return None

    @staticmethod
    def _delay(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(APART_CYCLES)


class Blocks(torch.nn.Module):
    """Attention by FlashAttention's kernel, dropout, and an activation; inputs of 2 MiB."""

    def __init__(self, depth: int, checkpointing: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 1536, dtype=torch.bfloat16) for _ in range(depth))
        self.checkpointing = checkpointing

    def block(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer(x).view(4, 512, 3, 8, 64).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + torch.nn.functional.gelu(mixed.transpose(1, 2).reshape(4, 512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointing else self.block(layer, x)
        return x.float().square().mean()


class Rig:
    def __init__(self, folder: Path, copies: CudaCopies, *, host_nbytes: int) -> None:
        self.arena = HostArena(None, Locking.CUDA)
        self.backend = PosixBackend()
        self.store = ExtentStore(str(folder / "activations.bin"), self.backend, growth_nbytes=64 << 20, timeout_s=60)
        resident = HostBuffers(
            self.arena,
            lambda nbytes: resident.allocated_nbytes + nbytes <= host_nbytes, lambda nbytes: None, "tests", poison=True,
        )  # fmt: skip
        staging = HostBuffers(self.arena, lambda nbytes: True, lambda nbytes: None, "staging", poison=True)
        self.counters = Counters()
        self.saved = SavedTensors(
            device=torch.device("cuda", torch.cuda.current_device()), copies=copies, resident=resident, staging=staging,
            open_store=lambda: self.store, counters=self.counters, is_weight=lambda tensor: False, least_nbytes=2**16,
            host_capacity=lambda: host_nbytes, timeout_s=60, most_leaving_nbytes=2**22,
        )  # fmt: skip

    def hooks(self) -> saved_tensors_hooks:
        self.saved.begin_forward()
        saved = self.saved
        return saved_tensors_hooks(
            saved.save, lambda handle: saved.load(handle) if isinstance(handle, MovedTensor) else handle.unpack()
        )

    def close(self) -> None:
        torch.cuda.synchronize()
        self.saved.close()
        self.store.close()
        self.backend.close()
        self.arena.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    with ExitStack() as stack:

        def make(late: str = "", *, waits: bool = True, host_nbytes: int = 2**30) -> Rig:
            made = Rig(tmp_path, Apart(torch.device("cuda"), late, waits), host_nbytes=host_nbytes)
            stack.callback(made.close)
            return made

        yield make


def train(run: Callable[[torch.Tensor], torch.Tensor], model: Blocks, context: Callable[[], Any]) -> list[torch.Tensor]:
    """Loss and gradients of each step. Freed memory is overwritten at once by what the next layer allocates."""
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        x = torch.randn(4, 512, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
        model.zero_grad()
        with context():
            loss = run(x)
        loss.backward()
        found += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        del loss
    torch.cuda.synchronize()
    gc.collect()
    return found


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(left, right, strict=True))


def make_model(checkpointing: bool) -> Blocks:
    torch.manual_seed(0)
    return Blocks(6, checkpointing).cuda()


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("host_nbytes", [2**30, 0], ids=["ram", "nvme"])
@pytest.mark.parametrize("late", ["", "out", "back", "compute"])
def test_gradients_are_the_same_however_far_streams_are_apart(rig, late, host_nbytes, checkpointing):
    model, made = make_model(checkpointing), rig(late, host_nbytes=host_nbytes)
    expected = train(model, model, torch.enable_grad)
    assert same(train(model, model, torch.enable_grad), expected), "the model itself does not repeat"
    assert same(train(model, model, made.hooks), expected)
    moved = made.counters.total().nbytes
    assert moved["h2d"] > 8 * 2**20
    assert (moved["nvme_write"] > 0) == (host_nbytes == 0)


def test_without_waits_they_are_not(rig):
    model, made = make_model(False), rig("back", waits=False)
    expected = train(model, model, torch.enable_grad)
    assert not same(train(model, model, made.hooks), expected)


class Branches(Blocks):
    """Every second block runs on a stream of the user's, beside the one before it."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, checkpointing=False)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        for left, right in zip(self.layers[::2], self.layers[1::2], strict=True):
            side.wait_stream(main)
            x.record_stream(side)
            with torch.cuda.stream(side):
                there = self.block(right, x)
            here = self.block(left, x)
            main.wait_stream(side)
            there.record_stream(main)
            x = here + there
        return x.float().square().mean()


@pytest.mark.parametrize("late", ["", "out", "back", "compute"])
def test_blocks_on_a_stream_of_the_user(rig, late):
    torch.manual_seed(0)
    model, made = Branches(6).cuda(), rig(late)
    expected = train(model, model, torch.enable_grad)
    assert same(train(model, model, torch.enable_grad), expected), "the model itself does not repeat"
    assert same(train(model, model, made.hooks), expected)
    assert made.counters.total().nbytes["h2d"] > 8 * 2**20


def test_a_block_is_moved_while_another_stream_is_the_current_one():
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    copies, n = CudaCopies(device), 2**22
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    host = torch.zeros(n, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        copies.saving()
        torch.cuda._sleep(10 * APART_CYCLES)
        source.fill_(7)
    copies.out(host, source).synchronize()
    assert host.unique().tolist() == [7]


def test_memory_of_another_stream_is_not_reused_under_its_copies():
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    copies, n = CudaCopies(device), 2**25
    host = torch.zeros(n, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(side):
        copies.saving()
        source = torch.full((n,), 7, dtype=torch.uint8, device=device)
    with torch.cuda.stream(copies._out):
        torch.cuda._sleep(10 * APART_CYCLES)
    event = copies.out(host, source)
    copies.wait(event)
    del source
    with torch.cuda.stream(side):
        torch.full((n,), 1, dtype=torch.uint8, device=device)  # takes the memory that was freed
    torch.cuda.synchronize()
    assert host.unique().tolist() == [7]
    back, event = copies.back(host, None)
    copies.wait(event)
    with torch.cuda.stream(side):
        torch.cuda._sleep(10 * APART_CYCLES)
        used = back.clone()
    del back
    torch.full((n,), 1, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    assert used.unique().tolist() == [7]


def test_compiled_by_inductor(rig):
    model, made = make_model(False), rig("out")
    compiled = torch.compile(model)
    expected = train(compiled, model, torch.enable_grad)
    assert same(train(compiled, model, made.hooks), expected)
    assert made.counters.total().nbytes["d2h"] > 0
