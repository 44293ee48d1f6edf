# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` of an engine with TenCache: verified bytes, streamed; complete on every rank, or absent.

[Note: a checkpoint is all or nothing]

An error while a rank's files are written (its state cannot be read back correctly, the file system is full) is kept
until every rank has written its own. Files carry the suffix ``.partial`` until then. Where DeepSpeed commits the
checkpoint, all ranks agree: either every file gets its name, or none does and every rank raises. By then every rank's
files are durable, and so are their names when ``latest`` is replaced, at once. Stock DeepSpeed lets the other ranks
continue and overwrite ``latest``, or leaves them in a collective. With ``"checkpoint": "async"`` all ranks agree on
what they have begun, and later, in the background, on the rest: :mod:`tencache_ds.integration.background_save`.

Tensors that DeepSpeed's own writer would have to hold in memory are deferred (:class:`DeferredTensor`) and streamed
through pooled buffers. Other checkpoint engines keep tensors for longer, or pass them to another process: they get
copies, as do other callers of ``optimizer.state_dict()``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from tencache_ds.config import Checkpoint
from tencache_ds.errors import add_note
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.agreement import JobVotes
from tencache_ds.integration.background_save import (
    NOT_SAVED,
    BackgroundSave,
    CheckpointFiles,
    latest_of,
    not_saved,
    write_state,
)
from tencache_ds.integration.checkpoint import CheckpointMixin
from tencache_ds.integration.watched_tensors import WatchedStates, values_of
from tencache_ds.io.archive_writer import Write, write_archive
from tencache_ds.io.torch_archive import ArchiveFile, DeferredTensor, begin_archive, make_durable
from tencache_ds.tensors import zeros

_WRITERS = ("_save_checkpoint", "_save_moe_checkpoint", "_save_zero_checkpoint")
"""DeepSpeedEngine's methods that write files. They take part in no collective: one may fail while the others
continue."""


_jobs = itertools.count()
"""Numbers of engines that save in the background, in the order of their first save: the same on every rank."""


@dataclass(frozen=True, slots=True)
class _WeightKey:
    """A frozen weight's shard, by its parameter id."""

    ds_id: int


def hook_saving(engine_class: Any) -> None:
    """Makes ``save_checkpoint`` of engines with TenCache's optimizer all or nothing; others stay as they are."""
    stock = engine_class.save_checkpoint

    @functools.wraps(stock)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.optimizer, CheckpointMixin):
            return stock(self, *args, **kwargs)
        self.optimizer.finish_save()
        asked = inspect.signature(stock).bind(self, *args, **kwargs)
        latest_in = str(asked.arguments["save_dir"]) if asked.arguments.get("save_latest", True) else ""
        if not calls.commits_later(self.checkpoint_engine):
            asked.arguments["save_latest"] = False
        return CheckpointSave(self, save_dir=latest_in).run(lambda: stock(*asked.args, **asked.kwargs))

    engine_class.save_checkpoint = save_checkpoint
    stock_model = engine_class.save_16bit_model

    @functools.wraps(stock_model)
    def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.optimizer, CheckpointMixin):
            return stock_model(self, *args, **kwargs)
        self.optimizer.finish_save()
        return CheckpointSave(self, keeps=True).run(lambda: stock_model(self, *args, **kwargs))

    engine_class.save_16bit_model = save_16bit_model


class CheckpointSave:
    """One call of ``save_checkpoint``, or of ``save_16bit_model``, on this rank. See [Note: a checkpoint is all or
    nothing].

    Args:
        engine: whose.
        save_dir: where ``latest`` is to be written; empty if it is not.
        keeps: what is saved is a copy made for this, which may be written later.
    """

    def __init__(self, engine: Any, *, save_dir: str = "", keeps: bool = False) -> None:
        self._engine = engine
        self._optimizer: Any = engine.optimizer
        self._checkpoint_engine = engine.checkpoint_engine
        self._streams = type(self._checkpoint_engine) is TorchCheckpointEngine and calls.writes_archives(
            self._checkpoint_engine
        )
        self._in_background = self._streams and self._optimizer.tencache.options.checkpoint == Checkpoint.asynchronous
        self._error: Exception | None = None
        self._names = CheckpointFiles()
        self._archives: list[ArchiveFile] = []  # begun, of a checkpoint that is completed in the background
        self._save_dir = save_dir
        self._keeps = keeps
        self._tag = ""

    def run(self, save: Callable[[], Any]) -> Any:
        """Runs DeepSpeed's ``save_checkpoint``. Collective.

        Raises:
            StorageError: state could not be read back right, or a file not be written, on this rank.
            CheckpointError: that happened on another rank.
        """
        with self._substitutes():
            try:
                result = save()
                if calls.commits_later(self._checkpoint_engine):  # commits at the end of a later step
                    self._agree()
                elif self._in_background and self._tag:
                    self._complete_later()
            finally:
                for archive in self._archives:
                    archive.discard()
                self._names.discard()  # nothing is left to discard of a complete one
        return result

    def _complete_later(self) -> None:
        """The rest of the checkpoint is saved in the background: see [Note: in the background] in
        :mod:`tencache_ds.integration.background_save`."""
        optimizer = self._optimizer
        if optimizer.save_votes is None:
            optimizer.save_votes = JobVotes.of_job(f"checkpoints {next(_jobs)}")
        later = BackgroundSave(
            self._tag,
            self._archives,
            self._names,
            optimizer.save_votes,
            optimizer.tencache.checkpoint_buffers(),
            optimizer.step_guard.check,
            optimizer.tencache.drive_in_use({archive.device for archive in self._archives}),
        )
        self._archives, self._names = [], CheckpointFiles()
        optimizer.save_under_way = later
        try:
            optimizer.run_in_background(later.stage)
        except BaseException as error:
            later.fail(error)
            raise

    @contextlib.contextmanager
    def _substitutes(self) -> Iterator[None]:
        """DeepSpeed's engine writes through this object while one checkpoint is saved."""
        engine = self._engine
        engine.checkpoint_engine = _Delegate(self._checkpoint_engine, self)
        for name in _WRITERS:
            setattr(engine, name, self.kept(getattr(engine, name)))
        engine._get_param_fragment_func = self._fragment
        replaced = [*_WRITERS, "_get_param_fragment_func"]
        if self._in_background:
            # Two files that are truncated and written anew, whose data the kernel then writes at once.
            write_scripts = engine._copy_recovery_script
            engine._copy_recovery_script = lambda *args: self._names.add_late(functools.partial(write_scripts, *args))
            replaced.append("_copy_recovery_script")
        self._optimizer.defers_state, self._optimizer.defers_whole_state = self._streams, self._in_background
        optimizer, states = self._optimizer.optimizer, self._optimizer.optimizer.state
        if self._in_background and isinstance(states, WatchedStates):
            optimizer.state = states.plain()  # which does not wait for an update
        try:
            yield
        finally:
            optimizer.state = states
            self._optimizer.defers_state = self._optimizer.defers_whole_state = False
            engine.checkpoint_engine = self._checkpoint_engine
            for name in replaced:
                delattr(engine, name)

    def kept(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """``write`` with its error kept for the agreement; after an error nothing more is written."""

        @functools.wraps(write)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._error is not None:
                return None
            try:
                return write(*args, **kwargs)
            except Exception as error:
                self._error = error
                return None

        return call

    # The interface of DeepSpeed's checkpoint engine

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder of the checkpoint."""
        above = os.path.abspath(path)
        while not os.path.isdir(above):
            above = os.path.dirname(above)
            self._names.note_folder(above)
        try:
            self._checkpoint_engine.makedirs(path, exist_ok=exist_ok)
        except OSError as error:  # on one rank, and the others are about to wait for it
            self._error = self._error or error

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Writes one file of the checkpoint."""
        state_dict = self._with_frozen_weights(state_dict)
        if not self._streams:
            self._checkpoint_engine.save(state_dict, path)
            if type(self._checkpoint_engine) is TorchCheckpointEngine:
                make_durable(path)
                self._names.note_folder(os.path.dirname(path))
            return
        path, name = self._names.add(path), os.path.basename(path)
        if self._in_background:
            if self._keeps and get_accelerator().is_synchronized_device():
                state_dict = copy.deepcopy(state_dict)  # `.cpu()` was no copy
            self._archives.append(begin_archive(state_dict, path, name=name, keeps=self._keeps))
            self._write_frozen_weights(self._archives[-1], ArchiveFile.write)
        else:
            buffers = self._optimizer.tencache.checkpoint_buffers()
            write_archive(state_dict, path, self._write_everything, buffers, name=name)

    def commit(self, info: Any) -> Any:
        """Gives the files their names once they are there on every rank. Collective."""
        self._tag = calls.tag_of(info)
        latest = latest_of(self._engine, self._save_dir) if self._save_dir else None
        if latest is not None:
            self.kept(self._names.prepare_latest)(latest, self._tag)
        self._agree()
        if not self._in_background:
            self.kept(self._names.name)()
            self._agree()
            self._names.move_latest()
        return self._checkpoint_engine.commit(info)

    # Contents

    def _fragment(self, param: Any) -> torch.Tensor:
        """What DeepSpeed saves of a frozen weight; of one in the tier a placeholder, see below."""
        return values_of(param).cpu()

    def _with_frozen_weights(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Frozen weights are in the weight tier, and DeepSpeed saves them by their shard's tensor."""
        fragments = state_dict.get(FROZEN_PARAM_FRAGMENTS)
        if not fragments:
            return state_dict
        fragments = type(fragments)(fragments)
        for param in self._optimizer.frozen_in_tier():
            name = self._engine.param_names[param]
            if self._streams:
                shard = param.ds_tensor
                fragments[name] = DeferredTensor(_WeightKey(param.ds_id), shard.dtype, shard.ds_numel)
            else:
                fragments[name] = param.nvme_swapper.read(param)
        return {**state_dict, FROZEN_PARAM_FRAGMENTS: fragments}

    def _write_everything(self, file: ArchiveFile, write: Write) -> None:
        """Streams the contents of a file's deferred tensors, reading each byte once."""
        self._write_frozen_weights(file, write)
        write_state(self._optimizer.scan_state, [file], write)

    def _write_frozen_weights(self, file: ArchiveFile, write: Write) -> None:
        """Streams the frozen weights that a file defers, reading each byte once."""
        deferred = {key: tensor for key, tensor in file.deferred.items() if isinstance(key, _WeightKey)}
        if not deferred:
            return

        def weight(param: Any, shard: torch.Tensor) -> None:
            write(file, deferred[_WeightKey(param.ds_id)], shard)

        by_swapper: dict[Any, list[Any]] = {}
        for param in self._optimizer.frozen_in_tier():
            if _WeightKey(param.ds_id) in deferred:
                by_swapper.setdefault(param.nvme_swapper, []).append(param)
        for swapper, params in by_swapper.items():
            swapper.scan(params, weight)

    # The outcome

    def _agree(self) -> None:
        """Raises on every rank if one of them has an error. Collective."""
        failed = _ranks_where(self._error is not None)
        if not failed:
            return
        if calls.commits_later(self._checkpoint_engine):
            calls.forget_commit(self._checkpoint_engine)  # so that a later step does not complete this one
        if self._error is None:
            raise not_saved(failed)
        add_note(self._error, NOT_SAVED)
        raise self._error


class _Delegate:
    """A checkpoint engine as DeepSpeed sees it during one save."""

    def __init__(self, inner: Any, save: CheckpointSave) -> None:
        self._inner = inner
        self.makedirs, self.save, self.commit = save.makedirs, save.kept(save.save), save.commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _ranks_where(here: bool) -> list[int]:
    """The ranks that say yes. Collective."""
    if dist.get_world_size() == 1:
        return [0] if here else []
    votes = zeros(dist.get_world_size(), torch.int32, get_accelerator().current_device_name())
    votes[dist.get_rank()] = int(here)
    dist.all_reduce(votes)
    return [rank for rank, vote in enumerate(votes.tolist()) if vote]
