# SPDX-License-Identifier: Apache-2.0
"""Saving while storage, old or new, goes wrong: run like ``training.py``.

A scenario saves a good checkpoint, meets its faults one after the other, and reports per attempt: the error of each
rank, what ``latest`` names, and which files are in the folder of the tag.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import training
from checkpoint_contents import contents_of, flat, hashes

import tencache_ds
from tencache_ds.errors import StorageError
from tencache_ds.io.torch_archive import ArchiveFile, DeferredTensor
from tencache_ds.io.wrappers.faults import VARIABLE, parse_faults
from tencache_ds.runtime import session

LORA = {"model": "llama", "lora": True}
FILE_LIMIT_NBYTES = 200_000
IO_TIMEOUT_S = 1.0


class Saver:
    """An engine, and what comes of saving it."""

    def __init__(self, case: dict[str, Any], folder: str, rank: int, engine_name: str = "tencache") -> None:
        os.environ[VARIABLE] = "none"
        self.folder = Path(folder, "checkpoints", case["name"])
        self.engine = training.build(case, engine_name, os.path.join(folder, "nvme"))
        self._here = rank == case.get("rank", rank)
        self._rank = rank
        self._generator = torch.Generator().manual_seed(1000 + rank)
        self.result: dict[str, Any] = {"losses": []}

    def train(self, steps: int) -> None:
        self.result["losses"] += training.train(self.engine, steps, self._generator, oracle=False)

    @property
    def paths(self) -> list[Any]:
        return [path for part in self.engine.optimizer.tencache.all() for path in part.nvme.paths]

    def drain(self) -> None:
        training.drain(self.engine)

    @contextmanager
    def fault(self, rule: str) -> Iterator[None]:
        """Injects faults into scratch storage of the rank that is to have them."""
        for path in self.paths if self._here else ():
            path.backend.inject(parse_faults(rule))
        try:
            yield
        finally:
            for path in self.paths:
                path.backend.inject(parse_faults("none"))

    @contextmanager
    def file_limit(self) -> Iterator[None]:
        """No file may become longer: what a full file system or a quota of the checkpoint's does."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self._here:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_NBYTES, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    @contextmanager
    def noted_durability(self) -> Iterator[None]:
        """Notes what is made durable and renamed, and whether ``latest`` has moved by then."""
        fsync, replace = os.fsync, os.replace
        events = self.result["events"] = []

        def note(what: str, path: str) -> None:
            latest = self.folder / "latest"
            here = os.path.relpath(path, self.folder)
            events.append([what, here, latest.read_text() if latest.exists() else None])

        def noted_fsync(descriptor: int) -> None:
            fsync(descriptor)
            note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

        def noted_replace(source: str, target: str) -> None:
            replace(source, target)
            note("replace", target)

        os.fsync, os.replace = noted_fsync, noted_replace
        try:
            yield
        finally:
            os.fsync, os.replace = fsync, replace

    @contextmanager
    def failing_fsync(self) -> Iterator[None]:
        """What a device error says that the kernel met after the write."""
        fsync = os.fsync

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync = fail if self._here else fsync
        try:
            yield
        finally:
            os.fsync = fsync

    @contextmanager
    def failing_update(self) -> Iterator[None]:
        """What continues of a step in the background fails, a while after the step has returned."""

        def fail(*_: Any) -> None:
            time.sleep(0.5)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with self._updating(fail) if self._here else nullcontext():
            yield

    @contextmanager
    def slow_update(self, seconds: float) -> Iterator[None]:
        """What continues of a step in the background begins late."""
        run = self.engine.optimizer._chunked_step._background._update.run

        def run_late(*arguments: Any) -> None:
            time.sleep(seconds)
            run(*arguments)

        with self._updating(run_late):
            yield

    @contextmanager
    def _updating(self, run: Callable[..., None]) -> Iterator[None]:
        background = self.engine.optimizer._chunked_step._background
        update, background._update = background._update, SimpleNamespace(run=run)
        try:
            yield
        finally:
            background._update = update

    def save(self, attempt: str, tag: str | None = None) -> None:
        tag = tag or attempt
        self._note(attempt, tag, lambda: self.engine.save_checkpoint(str(self.folder), tag=tag))

    def save_async(self, attempt: str) -> None:
        """Saves in the background, and waits for it."""

        def save() -> None:
            self.begin_async(attempt)
            tencache_ds.wait_for_checkpoint(self.engine)

        self._note(attempt, attempt, save)

    def begin_async(self, tag: str) -> None:
        """Returns while the checkpoint is being written."""
        with self.in_background():
            self.engine.save_checkpoint(str(self.folder), tag=tag)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        options = self.engine.optimizer.tencache.options
        options.checkpoint = "async"
        try:
            yield
        finally:
            options.checkpoint = "sync"

    def save_model(self, tag: str) -> None:
        self.engine.save_16bit_model(str(self.folder / tag), "weights.pt")

    def _note(self, attempt: str, tag: str, action: Callable[[], Any]) -> None:
        outcome: dict[str, Any] = {"failure": ""}
        t_start = time.monotonic()
        try:
            action()
        except Exception as error:
            outcome["failure"] = f"{type(error).__name__}: {error}"
            outcome["storage"] = isinstance(error, StorageError)
            outcome["notes"] = getattr(error, "__notes__", [])
        outcome["seconds"] = time.monotonic() - t_start
        deepspeed.comm.barrier()
        outcome["latest"] = (self.folder / "latest").read_text()
        outcome["files"] = self.files(tag)
        deepspeed.comm.barrier()
        self.result[attempt] = outcome

    def wait_quietly(self) -> None:
        """Until the writer has ended, which tells nobody."""
        self.engine.optimizer.save_under_way.wait()
        deepspeed.comm.barrier()

    def files(self, tag: str) -> dict[str, str]:
        folder = self.folder / tag
        states = sorted(path for path in folder.iterdir() if path.suffix != ".py") if folder.is_dir() else []
        return {path.name: digest(path) for path in states}

    def scripts(self) -> dict[str, str]:
        """Those of DeepSpeed beside the checkpoints."""
        found = {path.name: digest(path) for path in self.folder.glob("*.py")}
        deepspeed.comm.barrier()
        return found

    def contents(self, tag: str) -> dict[str, str]:
        """Hashes of all tensors of a checkpoint."""
        found = contents_of(self.folder / tag)
        deepspeed.comm.barrier()
        return found

    def end(self) -> dict[str, Any]:
        self.result["weights"] = training.digests(self.engine.module)
        self.engine.destroy()
        return self.result

    def destroy(self) -> dict[str, Any]:
        try:
            self.engine.destroy()
        except StorageError as error:  # what had failed may be told again
            self.result["at_the_end"] = str(error)
        return self.result


def digest(path: Path) -> str:
    """Piece by piece: the peak of memory is measured."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def undisturbed(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    s = Saver(case | LORA, folder, rank)
    s.train(3)
    return s.end()


def damaged(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """Faults that occur only while saving harm one checkpoint and nothing else: the run continues unaffected."""
    s = Saver(case | LORA | {"tencache": {"verify": "full"}}, folder, rank)
    s.train(2)
    s.save("good")
    with s.fault("kind=eio,op=read,match=optimizer"):
        s.save("eio_optimizer")
    with s.fault("kind=eio,op=read,match=weight"):
        s.save("eio_frozen_weights")
    with s.fault("kind=eio,op=read,match=optimizer"):
        s.save("eio_over_a_good_one", tag="good")
    s.drain()
    with s.file_limit():
        s.save("full")
    with s.failing_fsync():
        s.save("not_durable")
    with s.noted_durability():
        s.save("again")
    for path in s.paths:
        shutil.rmtree(path.scratch.folder, ignore_errors=True)  # which another rank may have done
    s.save("names_removed")
    s.train(1)
    return s.end()


def flipped(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """What the last step wrote is not what lies on the device."""
    s = Saver(case | {"model": "mlp", "tencache": {"verify": "full"}}, folder, rank)
    s.train(1)
    s.save("good")
    with s.fault("kind=bitflip,op=write,times=1,after=2,match=optimizer"):
        s.train(1)
        s.drain()
    s.save("flipped")
    return s.destroy()


def torn(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    s = Saver(case | {"model": "mlp", "tencache": {"io_timeout_s": IO_TIMEOUT_S}}, folder, rank)
    s.train(1)
    s.save("good")
    with s.fault("kind=torn,op=write,times=1,after=2,match=optimizer"):
        s.train(1)
        s.drain()
    s.save("torn")
    with s.fault("kind=hang,op=read,match=optimizer,times=1"):
        s.save("hang")
    return s.destroy()


def failed_write(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """A write-back of the last step fails, and saving is the first to hear of it."""
    s = Saver(case | {"model": "mlp"}, folder, rank)
    s.train(1)
    s.save("good")
    with s.fault("kind=eio,op=write,times=1,after=2,match=optimizer"):
        s.train(1)
        s.save("failed_write")
    return s.destroy()


def in_background(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """Training goes on while checkpoints are written, one from the state in the midst of the other's."""
    s = Saver(case, folder, rank)
    session, update = s.engine.optimizer.tencache, s.engine.optimizer._optimizer_step
    under_way = []

    def seen(sub_group: int) -> None:
        under_way.append(session.update_under_way(0.0))
        update(sub_group)

    s.engine.optimizer._optimizer_step = seen
    s.train(2)
    del s.engine.optimizer._optimizer_step
    s.result["under_way"] = bool(under_way) and all(under_way)
    s.save("at_once")
    s.result["expected"] = s.contents("at_once")
    scripts = s.result["expected_scripts"] = s.scripts()
    if rank == 0:
        for name in scripts:
            (s.folder / name).unlink()
    s.begin_async("async")
    s.train(1)
    s.begin_async("next")
    s.result["latest_at_the_next"] = (s.folder / "latest").read_text()
    tencache_ds.wait_for_checkpoint(s.engine)
    deepspeed.comm.barrier()
    s.result["scripts"] = s.scripts()
    s.result["hidden_share"] = s.engine.optimizer._chunked_step.hidden_share()
    in_use = session.drive_in_use({os.stat(s.folder).st_dev})
    s.result["gives_way"] = in_use == session.update_under_way
    s.result["copies_left_nbytes"] = tencache_ds.stats(s.engine).checkpoint_nbytes
    s.result["latest_at_last"] = (s.folder / "latest").read_text()
    s.result["async"] = s.contents("async")
    s.save("next_at_once")
    s.result["next"], s.result["expected_next"] = s.contents("next"), s.contents("next_at_once")
    s.begin_async("unfinished")
    s.train(1)
    s.result["weights"] = training.digests(s.engine.module)
    s.destroy()
    deepspeed.comm.barrier()
    s.result["latest_after_destroy"] = (s.folder / "latest").read_text()
    s.result["partial"] = [path.name for path in s.folder.rglob("*.partial")]
    return s.result


def model(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """The 16-bit model is written while training goes on, or is not there, and that of before is."""
    s = Saver(case, folder, rank)
    s.train(2)
    s.save("good")

    def save(then: Callable[[], None] = lambda: None) -> None:
        with s.in_background():
            s.save_model("16_bit")
        then()
        tencache_ds.wait_for_checkpoint(s.engine)

    s.save_model("16_bit_at_once")
    s._note("saved", "16_bit", lambda: save(lambda: s.train(1)))
    s.result["contents"], s.result["expected"] = s.contents("16_bit"), s.contents("16_bit_at_once")
    with s.failing_fsync():
        s._note("not_durable", "16_bit", save)
        s._note("not_durable_at_once", "16_bit", lambda: s.save_model("16_bit"))
    s.save_model("16_bit_at_once")
    s.result["next"] = s.contents("16_bit_at_once")
    return s.end()


def async_void(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """The update that a checkpoint is saved behind goes on for long in the background, or fails there."""
    s = Saver(case, folder, rank)
    s.train(1)
    s.save("good")
    with s.slow_update(case["late_s"]):
        s.train(1)
        s._note("begun", "behind", lambda: s.begin_async("behind"))
        tencache_ds.wait_for_checkpoint(s.engine)
    s.save("behind_at_once")
    s.result["behind"], s.result["expected"] = s.contents("behind"), s.contents("behind_at_once")
    with s.failing_update():
        s.train(1)
        s.save_async("void")
    s.engine.load_checkpoint(str(s.folder))
    s.train(1)
    s.save_async("again")
    return s.end()


def at_exit(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """The last case: the process ends while a checkpoint is being written, and destroys nothing."""
    s = Saver(case, folder, rank)
    s.train(1)
    s.save("at_once")
    s.result["expected"] = s.contents("at_once")
    write = ArchiveFile.write

    def slow(self: ArchiveFile, tensor: DeferredTensor, data: torch.Tensor) -> None:
        time.sleep(0.2)
        write(self, tensor, data)

    ArchiveFile.write = slow
    s.begin_async("at_exit")
    s.result["latest"] = (s.folder / "latest").read_text()
    return s.result


def async_faults(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """What goes wrong in the background is told by the next call, and harms one checkpoint only."""
    s = Saver(case | LORA, folder, rank)
    s.train(2)
    s.save("good")
    with s.fault("kind=eio,op=read,match=optimizer"):
        s.save_async("eio_optimizer")
    with s.failing_fsync():
        s.save_async("not_durable")
    with s.fault("kind=eio,op=read,match=optimizer"):
        s.begin_async("eio_untold")
        s.wait_quietly()
    s.save("told_by_the_next_save", tag="again")
    s.save_async("again")
    s.save("at_once")
    s.train(1)
    return s.end()


def measured(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """How much memory and how many bytes of scratch storage a save takes."""
    sizes = {"sub_group_size": 2_000_000, "tencache": {"chunk_size": 2**22, "staging_memory": 2**25}}
    s = Saver(case | {"model": "mlp_wide"} | sizes, folder, rank)
    s.train(1)
    s.drain()
    before = tencache_ds.stats(s.engine)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    rss = memory("VmRSS")
    with mock.patch.object(session, "AT_ONCE_NBYTES", 2**23):  # of a third of the state
        s.save("measured")
    after = tencache_ds.stats(s.engine)
    s.result |= {
        "peak_growth_nbytes": memory("VmHWM") - rss,
        "read_nbytes": after.total.nbytes["nvme_read"] - before.total.nbytes["nvme_read"],
        "written_nbytes": after.total.nbytes["nvme_write"] - before.total.nbytes["nvme_write"],
        "numel": sum(int(n) for n in s.engine.optimizer.fp16_partitioned_groups_flat_numel),
    }
    return s.destroy()


def memory(what: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024


def copies(case: dict[str, Any], folder: str, rank: int) -> dict[str, Any]:
    """All writers other than DeepSpeed's own get values that training does not change, frozen weights included."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    kept: dict[str, Any] = {}

    class Keeper(TorchCheckpointEngine):
        def save(self, state_dict: dict[str, Any], path: str) -> None:
            kept[Path(path).name] = state_dict

    s = Saver(case | LORA, folder, rank)
    s.train(2)
    s.save("streamed")
    outside = s.engine.optimizer.state_dict()
    s.engine.checkpoint_engine = Keeper(s.engine._config)
    s.save("kept")
    s.train(1)
    expected = {}
    for name in kept:
        expected |= flat(torch.load(s.folder / "streamed" / name, weights_only=False), name)
    tensors = {}
    for name, state in kept.items():
        tensors |= flat(state, name)
    s.result |= {"expected": hashes(expected), "actual": hashes(tensors), "outside": hashes(flat(outside, ""))}
    return s.end()


SCENARIOS: dict[str, Callable[[dict[str, Any], str, int], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        undisturbed,
        damaged,
        flipped,
        torn,
        failed_write,
        measured,
        copies,
        in_background,
        model,
        async_faults,
        async_void,
        at_exit,
    )
}


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    return SCENARIOS[case["scenario"]]({"name": case["scenario"]} | case, folder, rank)


if __name__ == "__main__":
    training.main(run)
