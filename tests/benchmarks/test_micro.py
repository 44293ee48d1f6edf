# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from benchmarks.micro import __main__ as command
from benchmarks.micro import area, cpu_update, latency, pool, storage, variants
from benchmarks.micro.area import Load, Work
from benchmarks.micro.result import MicroReport, MicroResult, Row, alternate
from benchmarks.micro.variants import RAW, VARIANTS
from tencache_ds.cli import tune_measure
from tencache_ds.cli.tune_measure import Requests
from tencache_ds.errors import ConfigError, LockedMemoryError, SpaceError, StorageError
from tencache_ds.io import BACKENDS, Operation, Priority
from tencache_ds.memory.pages import Locking, PlainPages
from tencache_ds.profiling import probe
from tencache_ds.profiling.filesystem import supports_direct_io
from tencache_ds.profiling.probe import Area, Kind

pytestmark = pytest.mark.timeout(300)  # the first run builds DeepSpeed's ops

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    if not supports_direct_io(tmp_path):
        pytest.skip("the temporary folder has no O_DIRECT")
    return tmp_path


def present(result: MicroResult) -> list[Row]:
    return [row for row in result.rows if row.value is not None]


def assert_sound(result: MicroResult) -> None:
    """What holds for every micro-benchmark: figures that can be, reasons where there are none, a lossless file."""
    assert present(result)
    for row in result.rows:
        if row.value is None:
            assert row.note
            assert row.spread is None
        elif row.unit != "%":
            assert row.value > 0
            assert row.spread >= 0
            assert len(row.samples) == 5
    assert MicroResult.model_validate_json(result.model_dump_json()) == result
    table = result.table()
    assert all(row.text in table for row in present(result))
    assert all(row.note in table for row in result.rows)


def test_pool():
    result = pool.run(0.2, model="7M")
    assert_sound(result)
    for threads, slots in ((1, 1), (8, 8), (8, 4)):
        assert result.value(pool.POOL, "lease and return", threads=threads, slots=slots) > 1000
    for ranks in (1, 8):
        # Exact slots for every shard: only the waste bound of a class and the rounding to pages are lost.
        assert 0 <= result.value(pool.POOL, "memory overhead", ranks=ranks) <= 20
        assert 0 < result.value(pool.POOL, "staged share", ranks=ranks) <= 100
    measured = {row.variant for row in present(result) if row.quantity == "memory overhead"}
    assert (pool.TORCH in measured) is torch.cuda.is_available()


def test_shards_are_those_of_the_model_without_some_layers():
    whole, layers = pool.shard_nbytes("7M", 1, 1 << 40)
    assert layers == 4
    assert len(whole) == 2 + 4 * 7  # the norms are too small
    assert whole[0] == 8192 * 256 * 2
    cut, kept = pool.shard_nbytes("7M", 1, sum(whole) - 1)
    assert (kept, len(cut)) == (3, 2 + 3 * 7)
    one, kept = pool.shard_nbytes("7M", 1, 1)
    assert kept == 1
    halves, _ = pool.shard_nbytes("7M", 2, 1 << 40)
    assert halves[0] == whole[0] // 2


def test_storage(folder):
    result = storage.run(folder, 0.3, lanes=[1, 2], requests_nbytes=[256 << 10, MIB], working_set_nbytes=32 * MIB)
    assert_sound(result)
    assert os.listdir(folder) == []
    # Slow storage leaves out cases, but not the first one.
    assert {row.variant for row in result.rows} - {"any variant"} == {variant.name for variant in VARIANTS}
    assert {row.case["operation"] for row in present(result)} == {"read", "write", "mixed"}
    # Each is varied with the other in the middle (of two, the larger); each pair once.
    assert {(row.case["request"], row.case["lanes"]) for row in result.rows} == {
        ("0.25 MiB", 2), ("1 MiB", 1), ("1 MiB", 2)
    }  # fmt: skip
    for name in ("raw x4", "posix", "store on posix"):
        assert all(row.value for row in result.rows if row.variant == name and row.case["request"] == "0.25 MiB")
    # More threads than requests in flight cannot be.
    assert "needs 8 requests in flight" in {row.note for row in result.rows if row.variant == "raw x8"}
    assert all(row.value is None for row in result.rows if row.variant == "raw x8")
    # The only raw variant is the best one.
    for row in present(result):
        if row.variant == "raw x4" and row.quantity == "of best raw":
            assert row.samples == [1.0] * 5


def test_ratios_are_taken_round_by_round_to_the_best_reference():
    rates = pd.DataFrame({"raw x4": [4.0, 4.0, 8.0], "raw x8": [5.0, 5.0, 10.0], "native": [5.0, 4.0, 10.0]})
    (ratios,) = storage._ratios(rates).values()
    assert ratios.to_dict("list") == {"raw x4": [0.8] * 3, "raw x8": [1.0] * 3, "native": [1.0, 0.8, 1.0]}
    assert list(storage._ratios(rates.assign(**{"stock handle x4": 1.0}))) == ["of best raw", "of stock"]


def test_latency(folder):
    result = latency.run(folder, 0.5, lanes=2, request_nbytes=256 << 10, working_set_nbytes=24 * MIB)
    assert os.listdir(folder) == []
    assert MicroResult.model_validate_json(result.model_dump_json()) == result
    assert {row.variant for row in result.rows} == {variant.name for variant in latency.VARIANTS}
    for name in ("native", "native after a pause"):
        for behind in latency.BEHIND:
            case = {"behind": behind}
            assert result.value(name, "p95", **case) >= result.value(name, "read", **case) > 0
            if behind != latency.ALONE:
                assert result.value(name, "of alone", **case) > 0
    with pytest.raises(SpaceError, match="working set"):
        latency.run(folder, 0.1, lanes=2, request_nbytes=MIB, working_set_nbytes=4 * MIB)
    assert os.listdir(folder) == []


def test_latency_figures():
    taken = {"nothing": [[0.001, 0.002, 0.003], [0.004]], "reads": [[0.004], [0.008, 0.008]]}
    result = MicroResult(name="x", parameters={})
    latency.add_figures(result, {("a", behind): rounds for behind, rounds in taken.items()})
    rows = {(row.quantity, row.case["behind"]): row for row in result.rows}
    assert rows["read", "nothing"].value == 2.5
    assert rows["read", "reads"].samples == [4.0, 8.0, 8.0]
    assert rows["p95", "nothing"].value == pytest.approx(3.85)
    assert rows["of alone", "reads"].samples == [2.0, 2.0]
    assert ("of alone", "nothing") not in rows


class Log:
    """Stands for a backend: what it was asked for. Requests end when somebody waits for them."""

    def __init__(self, asked):
        self.asked = asked

    def submit(self, request):
        nbytes = request.buffer.numel()
        self.asked.append((request.operation, request.path, request.priority, nbytes))
        return type("Ticket", (), {"nbytes": nbytes, "wait": lambda self, timeout_s: time.sleep(0.001)})()

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def asked(monkeypatch):
    log = []
    monkeypatch.setattr(tune_measure, "open_backend", lambda kind, settings: (Log(log), "asked for"))
    return log


def work(n_buffers=4, nbytes=4096):
    buffers = torch.zeros(n_buffers * nbytes, dtype=torch.uint8).split(nbytes)
    urgent = Requests("u", (torch.zeros(2 * nbytes, dtype=torch.uint8),), 3, lambda extent: ("u", extent))
    requests = Requests("folder", buffers, 2 * n_buffers, lambda extent: ("ab"[extent % 2], extent // 2 * nbytes))
    return Work(Area((), 0, nbytes, True, "folder"), requests, 2, "", urgent)


def test_reads_are_urgent_and_behind_a_full_queue(asked):
    with latency.on_backend("native", work()) as sample:
        assert len(sample(None, 0.0)) == 1
        assert asked == [(Operation.READ, "u", Priority.URGENT, 8192)]
        asked.clear()
        assert len(sample(Kind.MIXED, 0.1)) > 1
    first = [request[3] for request in asked[:-1]].index(8192)
    assert first >= 4
    background = asked[:first]
    assert {request[1] for request in background} == {"a", "b"}
    assert {request[0] for request in background} == {Operation.READ, Operation.WRITE}
    assert {request[2] for request in background} == {Priority.BACKGROUND}
    assert asked[-1] == "closed"


def test_the_first_urgent_read_of_each_backend_counts(asked):
    with latency.on_fresh_backends("native", work()) as sample:
        n_reads = len(sample(Kind.READ, 0.1))
    assert n_reads > 1
    assert asked.count("closed") == n_reads
    assert sum(request[2] is Priority.URGENT for request in asked if len(request) == 4) == n_reads


def test_a_stock_handle_that_loses_a_request_is_an_error(monkeypatch):
    class Handle:
        def __init__(self):
            self.asked = []

        def async_pread(self, buffer, path, offset):
            self.asked.append(path)

        def wait(self):
            batch, self.asked[:] = list(self.asked), []
            batches.append(batch)
            return len(batch) - lost

    batches, lost = [], 0
    monkeypatch.setattr(latency, "open_stock", lambda threads, work: SimpleNamespace(handle=Handle()))
    with latency.on_stock_handle(1, work()) as sample:
        assert len(sample(Kind.READ, 0.0)) == len(sample(None, 0.0)) == 1
        assert batches == [["a", "b", "a", "b", "u"], ["u"]]
        lost = 1
        with pytest.raises(StorageError, match="4 of 5 requests as completed"):
            sample(Kind.READ, 0.0)


def test_every_backend_is_measured_by_itself_and_under_the_store():
    names = {variant.name for variant in VARIANTS}
    assert {f"{prefix}{name}" for name in BACKENDS for prefix in ("", "store on ")} <= names


def test_storage_without_locked_memory(folder, monkeypatch):
    monkeypatch.setattr("tencache_ds.memory.arena.open_page_locker", _refuse_locking)
    chosen = [variant for variant in VARIANTS if variant not in RAW[1:]]
    result = storage.run(
        folder, 0.05, lanes=[1], requests_nbytes=[64 << 10], working_set_nbytes=6 * MIB, variants=chosen
    )
    for row in result.rows:
        locked_only = "aio" in row.variant or "stock" in row.variant
        assert (row.value is None) is locked_only
        assert not locked_only or "no lock here" in row.note
    assert os.listdir(folder) == []


def _refuse_locking(locking, *, inherited):
    if locking is Locking.NONE:
        return PlainPages()
    raise LockedMemoryError("no lock here")


def test_a_failing_variant_leaves_no_files(folder, monkeypatch):
    def fail(requests: object, kind: Kind, seconds: float, issue: object) -> int:
        raise OSError(5, "injected")

    monkeypatch.setattr(variants, "keep_in_flight", fail)
    with pytest.raises(OSError, match="injected"):
        storage.run(folder, 0.05, lanes=[1], requests_nbytes=[64 << 10], working_set_nbytes=6 * MIB)
    assert os.listdir(folder) == []


def test_cases_that_do_not_fit(folder):
    limits = {"lanes": [1], "working_set_nbytes": 6 * MIB}
    result = storage.run(folder, 0.05, requests_nbytes=[64 << 10, 4 * MIB], **limits)
    for row in result.rows:
        if row.variant not in ("raw x8", "raw x16"):
            assert (row.value is None) is (row.case["request"] == "4 MiB")
    with pytest.raises(SpaceError, match="choose smaller requests"):
        storage.run(folder, 0.05, requests_nbytes=[4 * MIB], **limits)
    assert os.listdir(folder) == []


def test_without_direct_io_it_refuses(folder, monkeypatch):
    monkeypatch.setattr(probe, "open_direct", lambda path, flags: None)
    with pytest.raises(ConfigError, match="page cache would be measured"):
        storage.run(folder, 0.05)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_moves_what_it_says(folder, variant):
    """Reads bring the file's bytes, writes change it, mixed does both; in every variant."""
    n_buffers, nbytes = 16, 64 << 10
    with ExitStack() as stack:
        (work,), _ = stack.enter_context(area.open_works(folder, 4 * MIB, [Load(8, nbytes)], 2))
        if variant.needs_locked and work.unlocked:
            pytest.skip(work.unlocked)
        buffers = work.requests.buffers
        assert (len(buffers), work.requests.n_extents) == (n_buffers, 32)
        contents = [_content(work, slot) for slot in range(n_buffers)]
        written = [buffer.clone() for buffer in buffers]
        transfer = stack.enter_context(variant.open(work))
        assert transfer(Kind.READ, 0.0) >= nbytes
        if variant not in RAW:  # whose threads stop one by one
            expected = written if variant.has_own_files else contents
            assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
        for buffer in buffers:
            buffer.fill_(7)
        assert transfer(Kind.WRITE, 0.0) >= nbytes
        changed = [not torch.equal(_content(work, slot), contents[slot]) for slot in range(n_buffers)]
        if variant.has_own_files:
            assert not any(changed)
        else:
            assert all(changed) or (variant in RAW and changed[0])
        buffers[0].zero_()
        assert transfer(Kind.READ, 0.0) >= nbytes
        assert int(buffers[0][0]) == 7
        assert transfer(Kind.MIXED, 0.0) >= nbytes
    assert os.listdir(folder) == []


def _content(work: Work, extent: int) -> torch.Tensor:
    """The bytes of an extent of the shared files."""
    path, offset = work.requests.place(extent)
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(os.pread(file.fileno(), 64 << 10, offset)), dtype=torch.uint8)


def test_cpu_update():
    result = cpu_update.run(0.001, threads=[1, 2], numel=(1 << 20) + 5)
    assert result.parameters["params"] == (1 << 20) + 5
    for threads in (1, 2):
        for name in (cpu_update.CHUNKS, cpu_update.PASSES, cpu_update.ADAM):
            assert result.value(name, "update", threads=threads) > 0
        assert result.value(cpu_update.COPY, "memory traffic", threads=threads) > 0
    assert_sound(result)


def test_cpu_update_refuses_to_compare_different_results(monkeypatch):
    update = cpu_update._Flat.update

    def otherwise(flat):
        update(flat)
        flat.weights.add_(1)

    monkeypatch.setattr(cpu_update._Flat, "update", otherwise)
    with pytest.raises(RuntimeError, match="different weights"):
        cpu_update.run(0.1, threads=[1], numel=1 << 18)


def test_alternation():
    order: list[str] = []
    values = iter(range(100))
    variants = {name: lambda name=name: (order.append(name), next(values))[1] for name in "abc"}
    samples = alternate("x", variants, 5)
    assert "".join(order) == "abcbcacababcbcacab"
    assert all(len(taken) == 5 for taken in samples.values())
    assert min(min(taken) for taken in samples.values()) == 3  # the first round does not count


def test_rows():
    result = MicroResult(name="x", parameters={})
    result.add("rate", "GB/s", {"lanes": 1}, {"a": [5.0, 1.0, 2.0, 4.0, 3.0], "b": [7.0]})
    assert [(row.variant, row.value, row.spread) for row in result.rows] == [("a", 3.0, 2.0), ("b", 7.0, 0.0)]
    assert result.value("a", "rate", lanes=1) == 3.0
    with pytest.raises(KeyError, match="x has no rate of a"):
        result.value("a", "rate", lanes=2)


def test_table_of_variants():
    result = MicroResult(name="x", parameters={"seed": 3})
    result.add("rate", "GB/s", {"lanes": 1}, {"a": [1.0, 2.0, 3.0], "b": [1234.5]})
    result.add("ratio", "", {"lanes": 2}, {"a": [0.5]})
    result.lack("c", {"lanes": 2}, "not here")
    lines = [line.split() for line in result.table().splitlines()]
    assert lines[0] == ["x:", "median", "±", "interquartile", "range"]
    assert lines[1:5] == [
        ["variant", "a", "b"], ["figure", "lanes"],
        ["rate", "[GB/s]", "1", "2", "±1", "1,234"], ["ratio", "2", "0.5", "–"],
    ]  # fmt: skip
    assert lines[5:] == [["seed:", "3"], ["no", "figure", "for", "c:", "not", "here"]]


def test_table_with_a_case_in_its_columns():
    result = MicroResult(name="x", parameters={}, columns="operation")
    for operation, value in (("read", 1.0), ("write", 2.0)):
        result.add("rate", "GB/s", {"operation": operation, "lanes": 1}, {"a": [value]})
    lines = [line.split() for line in result.table().splitlines()[1:]]
    assert lines[0] == ["operation", "read", "write"]
    assert lines[-1] == ["1", "a", "1", "2"]


def test_command(folder, capfd):  # not capsys: DeepSpeed's builders need a sys.stderr with a file descriptor
    nvme, file = folder / "nvme", folder / "micro.json"
    arguments = ["storage", "--nvme-path", str(nvme), "--seconds", "1", "--lanes", "1", "--request", "64KiB"]
    assert command.main([*arguments, "--working-set", "3MiB", "--variants", "posix", "--json", str(file)]) == 0
    assert "raw x4" in capfd.readouterr().out
    report = MicroReport.read(file)
    assert [result.name for result in report.results] == ["storage"]
    assert {row.variant for row in report.results[0].rows} == {"posix", *(variant.name for variant in RAW)}
    rows = json.loads(file.read_text())["results"][0]["rows"]
    assert all(row["samples"] for row in rows if row["variant"] in ("raw x4", "posix"))
    assert os.listdir(nvme) == []


def test_command_runs_several(folder, capfd):
    arguments = ["latency", "pool", "--nvme-path", str(folder), "--seconds", "1", "--lanes", "1", "--variants", "posix"]
    assert command.main([*arguments, "--working-set", "72MiB"]) == 0
    shown = capfd.readouterr().out
    assert shown.index("pool:") < shown.index("latency:")
    assert "of alone" in shown
    assert "native" not in shown


def test_command_needs_a_variant_that_there_is(folder, capsys):
    assert command.main(["latency", "--nvme-path", str(folder), "--variants", "store on native"]) == 1
    message = "--variants store on native: there are only aio, native, native after a pause, posix, stock"
    assert message in capsys.readouterr().err


def test_command_says_what_could_not_run(folder, capsys):
    (folder / "file").write_text("")
    assert command.main(["storage", "--nvme-path", str(folder / "file")]) == 1
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--seconds", "0"], ["--request", "1000"], ["--lanes", "0"], ["nothing"], ["--variants", "posix", "posx"]],
)
def test_command_line_errors(arguments, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
