# SPDX-License-Identifier: Apache-2.0
"""Real autograd on small graphs, with copies that are over only when a stream would have come to them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from tencache_ds.activations import copies as copies_module
from tencache_ds.activations.auto_places import AutoPlaces
from tencache_ds.activations.blocks import KeptTensor, MovedTensor
from tencache_ds.activations.copies import CudaCopies, HostBuffers, PlainCopies
from tencache_ds.activations.saved_tensors import SavedTensors
from tencache_ds.errors import InplaceChangeError, StorageError, TenCacheError
from tencache_ds.io import ExtentStore, Operation
from tencache_ds.memory import HostArena, Locking
from tencache_ds.observability.counters import Counters
from tests.activations.counted_memory import CountedMemory
from tests.tiers.conftest import TIMEOUT_S, ControlledBackend

CPU = torch.device("cpu")
BIG = 10**9


class StreamEvent:
    """Done when the stream has come to it."""

    def __init__(self, stream: LateCopies) -> None:
        self._stream = stream
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._stream.run_until(self)


class LateCopies:
    """Copies like those of a GPU's streams: carried out when somebody waits for them, the compute stream or the host,
    and not before. It holds no memory, as a device does not: memory freed too early is found out.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[StorageWeakRef, torch.Tensor, int, bool, StreamEvent]] = []
        self.n_host_waits = 0

    def saving(self) -> None: ...

    def out(self, target: torch.Tensor, source: torch.Tensor) -> StreamEvent:
        return self._add(source.untyped_storage(), target, is_out=True)

    def back(self, source: torch.Tensor, after: StreamEvent | None) -> tuple[torch.Tensor, StreamEvent]:
        if after is not None:
            self.run_until(after)
        target = torch.full((source.numel(),), 0xEE, dtype=torch.uint8)
        return target, self._add(target.untyped_storage(), source, is_out=False)

    def wait(self, event: StreamEvent | None) -> None:
        if event is not None:
            self.run_until(event)

    def rates(self) -> None:
        return None

    def _add(self, storage: torch.UntypedStorage, host: torch.Tensor, *, is_out: bool) -> StreamEvent:
        event = StreamEvent(self)
        self.queue.append((StorageWeakRef(storage), host, storage.nbytes(), is_out, event))
        return event

    def run_until(self, last: StreamEvent) -> None:
        while not last.done:
            reference, host, nbytes, is_out, event = self.queue.pop(0)
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            assert storage is not None, "device memory was freed under a copy"
            device = torch.empty(0, dtype=torch.uint8).set_(storage)
            if is_out:
                host[:nbytes].copy_(device)
            else:
                device.copy_(host[:nbytes])
            event.done = True


class Stream:
    """Remembers the streams that it waits for and the events."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        self.wait_stream = self.wait_event = self.waited.append

    def record_event(self) -> str:
        return "copied"


def test_copies_are_ordered_with_all_streams_that_tensors_were_saved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side, other = Stream(), Stream(), Stream()
    current, recorded = [side], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(copies_module, "_measured_rates", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    copies = CudaCopies(CPU)
    copies.saving()
    current[0] = main  # the block is moved while another stream is the current one
    source, target = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    assert copies.out(target, source) == "copied"
    assert {*copies._out.waited} == {main, side}
    copies.wait("copied")  # its memory is freed, and may be of either stream
    assert (main.waited, side.waited, other.waited) == (["copied"], ["copied"], [])
    copies.back(target, None)
    assert recorded == [side]


class Rig:
    """Hooks over real memory and a real file."""

    def __init__(
        self,
        folder: Path,
        *,
        host_nbytes: int = BIG,
        staging_nbytes: int = BIG,
        nvme: bool = True,
        late: bool = False,
        least_nbytes: int = 1024,
        auto: AutoPlaces | None = None,
    ) -> None:
        self.counters = Counters()
        self.arena = HostArena(None, Locking.NONE)
        self.backend = ControlledBackend()
        self.store = ExtentStore(
            str(folder / "activations.bin"), self.backend, growth_nbytes=1 << 20, timeout_s=TIMEOUT_S
        )
        self.copies: Any = LateCopies() if late else PlainCopies(CPU)
        if not late:
            self.copies.rates = lambda: None  # places do not depend on how fast this machine is
        self.weights: set[int] = set()
        self.host_nbytes = host_nbytes
        self.resident = self._buffers(host_nbytes)
        self.staging = self._buffers(staging_nbytes)
        self.saved = SavedTensors(
            device=CPU,
            copies=self.copies,
            resident=self.resident,
            staging=self.staging,
            open_store=(lambda: self.store) if nvme else None,
            counters=self.counters,
            is_weight=lambda tensor: tensor.untyped_storage()._cdata in self.weights,
            least_nbytes=least_nbytes,
            host_capacity=lambda: host_nbytes,
            timeout_s=TIMEOUT_S,
            auto=auto,
            most_leaving_nbytes=2**15,
        )

    def _buffers(self, limit_nbytes: int) -> HostBuffers:
        taken = [0]

        def count(nbytes: int) -> None:
            taken[0] += nbytes

        return HostBuffers(self.arena, lambda nbytes: taken[0] + nbytes <= limit_nbytes, count, "tests", poison=True)

    def hooks(self) -> saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> Any:
            with _disable_current_modes():
                return self.saved.save(tensor)

        def unpack(handle: Any) -> torch.Tensor:
            return self.saved.load(handle) if isinstance(handle, MovedTensor) else handle.unpack()

        with _disable_current_modes():  # host buffers that come back are poisoned, which is an operation, too
            self.saved.begin_forward()
        return saved_tensors_hooks(pack, unpack)

    def settle(self) -> None:
        """What a step's end does, until nothing is under way."""
        for _ in range(2):
            self.saved.step_done()
            if isinstance(self.copies, LateCopies) and self.copies.queue:
                self.copies.run_until(self.copies.queue[-1][-1])
            self.store.drain()
        self.saved.step_done()

    def assert_idle(self) -> None:
        gc.collect()
        self.settle()
        assert self.saved.live_nbytes == 0
        assert self.resident.used_nbytes == self.staging.used_nbytes == 0
        assert self.store.nbytes_allocated == 0
        assert self.saved._reloads.arriving_nbytes == self.saved._leaving_nbytes == 0

    def close(self) -> None:
        self.backend.open_gates()
        self.saved.close()
        self.store.close()
        self.backend.close()
        self.arena.close()


@pytest.fixture
def rig(tmp_path):
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "nvme": {"host_nbytes": 0},
    "both": {"host_nbytes": 3 * 2**14},
    "late_host": {"late": True},
    "late_nvme": {"late": True, "host_nbytes": 0},
    "little_staging": {"late": True, "host_nbytes": 0, "staging_nbytes": 2 * 2**14},
    "no_room": {"host_nbytes": 0, "nvme": False},
}


class Layers(torch.nn.Module):
    """Residual layers with dropout; a layer's input is 16 KiB."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(depth))
        self.checkpointing: bool | None = None

    def block(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k = torch.tanh(layer(x)).chunk(2, dim=1)  # views of one storage
        attended = (q @ k.t()).softmax(dim=1)
        x = x + torch.nn.functional.dropout(attended @ torch.cat((k, q), dim=1), 0.1)
        return torch.nn.functional.relu(x * 0.9, inplace=True)

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == skip:
                continue
            if self.checkpointing is None:
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.checkpointing)
        return x.square().mean()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(
    model: Layers, context: Callable[[], Any], steps: int = 4, skips: tuple[int, ...] = (-1,)
) -> list[list[torch.Tensor]]:
    found = []
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(11)
    for step in range(steps):
        x = torch.randn(64, 64, generator=generator).requires_grad_()
        model.zero_grad()
        with context():
            loss = model(x, skips[step % len(skips)])
        loss.backward()
        found.append([loss.detach(), *gradients(model)])
    return found


def assert_equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def plain() -> Any:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_the_same_wherever_activations_are(rig, place, checkpointing):
    model, made = Layers(), rig(**PLACES[place])
    model.checkpointing = checkpointing
    expected = train(model, lambda: torch.enable_grad())
    assert_equal(train(model, made.hooks), expected)
    moved = made.counters.total().nbytes
    assert (moved["d2h"] == 0) == (place == "no_room")
    assert moved["nvme_write"] == 0 or place in ("nvme", "both", "late_nvme", "little_staging")
    assert moved["nvme_write"] > 0 or place not in ("nvme", "both", "little_staging")
    made.assert_idle()


@pytest.mark.parametrize("place", ["host", "both", "late_nvme"])
def test_layers_that_are_skipped_at_random_cost_no_correctness(rig, place):
    model, made = Layers(), rig(**PLACES[place])
    skips = (1, -1, 4, -1, -1, 0, 5)
    expected = train(model, lambda: torch.enable_grad(), 10, skips)
    assert_equal(train(model, made.hooks, 10, skips), expected)
    made.assert_idle()


def device_nbytes(build: Callable[[], Any]) -> tuple[Any, int]:
    """What ``build`` returns, and the bytes of the storages that its operations made and that are alive after it."""

    with CountedMemory() as memory:
        result = build()
    return result, memory.alive_nbytes()


@pytest.mark.parametrize("place", ["host", "nvme", "both"])
def test_memory_between_forward_and_backward_falls_by_what_was_moved(rig, place):
    model, made = Layers(), rig(**PLACES[place])
    train(model, made.hooks, 3)  # recorded
    x = torch.randn(64, 64).requires_grad_()

    def forward(context: Callable[[], Any]) -> torch.Tensor:
        with context():
            return model(x)

    loss, before_nbytes = device_nbytes(lambda: forward(torch.enable_grad))
    del loss
    loss, held_nbytes = device_nbytes(lambda: forward(made.hooks))
    loss.backward()
    figures = made.saved.figures
    assert figures.host_nbytes + figures.nvme_nbytes > 0.8 * before_nbytes
    assert before_nbytes - held_nbytes == figures.host_nbytes + figures.nvme_nbytes
    assert figures.host_nbytes <= made.host_nbytes
    if place == "nvme":
        assert figures.host_nbytes == 0


def test_backward_finds_most_of_it_reloaded(rig):
    model, made = Layers(depth=12), rig()
    train(model, made.hooks, 3)
    made.saved.begin_forward()
    figures = made.saved.figures
    assert figures.n_ahead > 5 * figures.n_late


def test_the_compute_stream_never_waits_for_the_newest_copy(rig):
    """A single block may be larger than what may be under way."""
    made = rig(late=True)
    x = torch.ones(2**14, requires_grad=True)  # with twice as many bytes
    with made.hooks():
        x = x.exp()
        assert len(made.copies.queue) == 1
        x = x.exp()
        assert len(made.copies.queue) == 1, "the older one is waited for"
    x.sum().backward()
    del x
    made.assert_idle()


def test_the_device_memory_of_a_backward_pass_is_bounded(rig):
    model, made = Layers(depth=20), rig()
    train(model, made.hooks, 2)
    x = torch.randn(64, 64)
    with made.hooks():
        loss = model(x)
    moved_nbytes = made.saved._moved_nbytes
    peaks = []
    load = made.saved.load

    def watched(handle: Any) -> torch.Tensor:
        tensor = load(handle)
        peaks.append(made.saved._reloads.arriving_nbytes)
        return tensor

    made.saved.load = watched
    loss.backward()
    assert 0 < max(peaks) <= moved_nbytes / 8


def test_small_tensors_and_weights_stay(rig):
    made = rig(least_nbytes=16 * 1024)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    gathered = torch.randn(64, 64)
    made.weights.add(gathered.untyped_storage()._cdata)
    for tensor in (weight, weight.t(), weight[:32], gathered, gathered.view(-1)[64:], torch.randn(63, 64)):
        assert isinstance(made.saved.save(tensor), KeptTensor)
    assert isinstance(made.saved.save(torch.randn(64, 64)), MovedTensor)


def test_each_storage_is_moved_once_and_every_view_is_rebuilt(rig):
    made = rig()
    base = torch.arange(4096, dtype=torch.float32)
    views = [
        base.view(64, 64),
        base.view(64, 64).t(),
        base.view(64, 64)[3:7, ::2],
        base[5:].expand(3, 4091),
        base.as_strided((10, 10), (3, 1), 17),  # overlapping
        base.view(torch.int16)[7:],
        base[:0],
    ]
    expected = [view.clone() for view in views]
    properties = [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in views]
    handles = [made.saved.save(view) for view in views]
    del base, views
    assert made.counters.total().nbytes["d2h"] == 4 * 4096
    found = [made.saved.load(handle) for handle in handles]
    assert made.counters.total().nbytes["h2d"] == 4 * 4096
    assert len({tensor.untyped_storage()._cdata for tensor in found}) == 1
    for tensor, values, (shape, stride, offset, dtype) in zip(found, expected, properties, strict=True):
        assert torch.equal(tensor, values)
        assert (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) == (shape, stride, offset, dtype)
    del handles, found, tensor
    made.assert_idle()


def test_bytes_are_not_interpreted(rig):
    made = rig(host_nbytes=0)
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32)
    values = bits.clone().view(torch.float32)  # NaNs of every kind, infinities, denormals
    handle = made.saved.save(values)
    del values
    assert torch.equal(made.saved.load(handle).view(torch.int32), bits)


@pytest.mark.parametrize("size", [8, 64])
def test_a_change_in_place_is_an_error_as_without_hooks(rig, size):
    x = torch.randn(size, size, requires_grad=True)

    def run() -> None:
        y = torch.sigmoid(x)
        loss = y.sum()
        y.add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run()
    made = rig()
    with (
        pytest.raises(InplaceChangeError, match=rf"float32 tensor of shape \[{size}, {size}\] is at version 1"),
        made.hooks(),
    ):
        run()


def test_a_change_in_place_that_autograd_allows_is_no_error(rig):
    made = rig()
    x = torch.randn(64, 64, requires_grad=True)

    def run() -> torch.Tensor:
        x.grad = None
        y = torch.sigmoid(x)
        loss = (y * 2).add_(1).sum()
        y = torch.nn.functional.relu(x * 2, inplace=True) + 1
        (loss + y.sum()).backward()
        return x.grad.clone()

    expected = run()
    with made.hooks():
        assert torch.equal(run(), expected)


def test_one_storage_saved_before_and_after_a_change_is_two_blocks(rig):
    made = rig()
    tensor = torch.zeros(4096)
    before = made.saved.save(tensor)
    tensor.add_(1)
    after = made.saved.save(tensor)
    del tensor
    assert torch.equal(made.saved.load(after), torch.ones(4096))
    with pytest.raises(InplaceChangeError):
        made.saved.load(before)


@pytest.mark.parametrize("place", ["host", "nvme", "late_host"])
def test_a_graph_can_be_gone_through_again(rig, place):
    model, made = Layers(), rig(**PLACES[place])
    x = torch.randn(64, 64)
    torch.manual_seed(1)
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = gradients(model)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        with made.hooks():
            loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_equal([gradients(model)], [expected])
    del loss
    made.assert_idle()


@pytest.mark.parametrize("place", ["host", "nvme", "late_host"])
def test_double_backward(rig, place):
    made = rig(**PLACES[place])
    x = torch.randn(64, 64, requires_grad=True)

    def penalty() -> torch.Tensor:
        x.grad = None
        (gradient,) = torch.autograd.grad(torch.sigmoid(x).pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return x.grad.clone()

    expected = penalty()
    with made.hooks():
        assert torch.equal(penalty(), expected)
    made.assert_idle()


@pytest.mark.parametrize("place", ["host", "nvme", "late_host", "late_nvme", "little_staging"])
def test_a_graph_that_is_dropped_leaves_nothing(rig, place):
    model, made = Layers(), rig(**PLACES[place])
    train(model, made.hooks, 2)
    for _ in range(3):
        with made.hooks():
            loss = model(torch.randn(64, 64))
        del loss
    model.layers[4].forward = lambda x: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), made.hooks():
        model(torch.randn(64, 64))
    del model.layers[4].forward
    made.assert_idle()
    expected = train(model, lambda: torch.enable_grad())
    assert_equal(train(model, made.hooks), expected)


def test_reloads_that_backward_does_not_come_to_leave_nothing(rig):
    model, made = Layers(), rig(late=True)
    train(model, made.hooks, 2)

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    x = torch.randn(64, 64)
    with made.hooks():
        y = x
        for index, layer in enumerate(model.layers):
            y = model.block(layer, Stop.apply(y) if index == 3 else y)
        loss = y.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss, y
    made.assert_idle()


def test_two_forwards_before_one_backward_are_one_pass(rig):
    model, made = Layers(), rig()
    x = torch.randn(64, 64)
    for _ in range(3):
        with made.hooks():
            first = model(x)
        with made.hooks():
            second = model(x + 1)
        (first + second).backward()
    made.saved.begin_forward()
    assert made.saved.figures.n_ahead > made.saved.figures.n_late
    del first, second
    made.assert_idle()


def test_memory_that_the_script_holds_itself_is_not_moved_again(rig):
    made = rig()
    x = torch.randn(64, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    for step in range(5):
        with made.hooks():
            loss = (torch.sigmoid(x @ weight) * 2).sum()
        moved_nbytes = made.saved._moved_nbytes
        loss.backward()
        # In the first pass x too; the result of the sigmoid, which nothing else holds, in each of them.
        assert moved_nbytes >= 2**14
        assert step == 0 or moved_nbytes == 2**14
    assert made.counters.total().nbytes["h2d"] == 5 * 2**14


def test_a_script_s_own_hooks_inside_take_the_tensors(rig):
    model, made = Layers(), rig()
    expected = train(model, lambda: torch.enable_grad(), 2)
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    class Both:
        def __enter__(self) -> None:
            self.outer, self.inner = made.hooks(), saved_tensors_hooks(pack, lambda t: t)
            self.outer.__enter__()
            self.inner.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)
            self.outer.__exit__(*error)

    assert_equal(train(model, Both, 2), expected)
    assert seen
    assert made.counters.total().nbytes["d2h"] == 0


@pytest.mark.parametrize("operation", list(Operation))
def test_a_failure_of_storage_names_the_activation(rig, operation):
    model, made = Layers(), rig(host_nbytes=0)
    made.backend.fails = lambda failing, tag: failing is operation and tag.startswith("activation 4 ")

    def run() -> None:
        train(model, made.hooks, 2)
        made.store.drain()

    with pytest.raises(StorageError, match=rf"{operation.value} of activation 4 \(float32 \[64, .*injected"):
        run()
    made.backend.fails = lambda failing, tag: False
    gc.collect()
    made.settle()
    expected = train(model, lambda: torch.enable_grad())
    assert_equal(train(model, made.hooks), expected)
    made.assert_idle()


def test_a_graph_that_outlives_its_engine_says_so(rig):
    model, made = Layers(), rig()
    with made.hooks():
        loss = model(torch.randn(64, 64))
    made.saved.close()
    with pytest.raises(TenCacheError, match="this DeepSpeed engine was destroyed"):
        loss.backward()
    with pytest.raises(TenCacheError), made.hooks():
        model(torch.randn(64, 64))


def test_closing_under_copies_frees_no_memory_that_they_still_use(rig):
    model, made = Layers(), rig(late=True)
    train(model, made.hooks, 2)
    with made.hooks():
        loss = model(torch.randn(64, 64))
    (gradient,) = torch.autograd.grad(loss, model.layers[-1].bias, retain_graph=True)  # reloads more than it needs
    del loss, gradient
    assert not all(is_out for _, _, _, is_out, _ in made.copies.queue)
    made.saved.close()
    if made.copies.queue:
        made.copies.run_until(made.copies.queue[-1][-1])


def test_no_host_wait_for_copies(rig):
    model, made = Layers(), rig(late=True)
    waits = []
    StreamEvent.synchronize, original = (lambda self: waits.append(self)), StreamEvent.synchronize
    try:
        train(model, made.hooks, 3)
    finally:
        StreamEvent.synchronize = original
    assert not waits


def test_compiled_models(rig):
    model, made = Layers(depth=1), rig()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(64, 64)
    torch.manual_seed(1)
    compiled(x).backward()
    expected = gradients(model)
    model.zero_grad()
    torch.manual_seed(1)
    with made.hooks():
        loss = compiled(x)
    loss.backward()
    assert_equal([gradients(model)], [expected])
    assert made.counters.total().nbytes["d2h"] > 0
    del loss
    made.assert_idle()
