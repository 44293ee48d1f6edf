# SPDX-License-Identifier: Apache-2.0
"""What a run reports: messages to the user, and the figures of each step to DeepSpeed's monitor.

Messages are shown exactly once, whatever levels, handlers and filters a framework gives to loggers. They are printed,
not logged: DeepSpeed's logger hides INFO by default, and its level alone does not tell whether anything is written.
transformers, for one, sets the logger to INFO and leaves DeepSpeed's handler at WARNING.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tencache_ds.config import Log, TenCacheConfig
from tencache_ds.errors import TenCacheError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.agreement import agreed
from tencache_ds.integration.hooked_modules import shard_nbytes
from tencache_ds.integration.model_weights import place_of
from tencache_ds.observability import tracing
from tencache_ds.observability.channel import Channel, Client
from tencache_ds.observability.counters import Stats
from tencache_ds.observability.summary import monitor_events, summary
from tencache_ds.observability.trace_file import RankRecording, write_trace
from tencache_ds.observability.tracing import StepTrace
from tencache_ds.placement.places import Place
from tencache_ds.runtime.session import Session

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions whose summary has not been printed yet."""

_pid = os.getpid()


def announce(message: str, options: TenCacheConfig) -> None:
    """Prints the message on rank 0, unless ``log`` is ``quiet``."""
    if options.log == Log.normal and dist.get_rank() == 0:
        _say(message)


def announce_summary_at_end(session: Session) -> None:
    """Prints a summary of the run on rank 0 when the engine is destroyed, or else when the process ends."""
    if session.options.log == Log.normal and session.surroundings.rank == 0:
        session.on_close(_say_summary)
        _open_sessions.add(session)


@atexit.register
def _say_what_is_left() -> None:
    if os.getpid() != _pid:
        return
    for session in list(_open_sessions):
        if not session.closed:
            _say_summary(session.stats())


def _say_summary(stats: Stats) -> None:
    for line in summary(stats):
        _say(f"TenCache: {line}")


def _say(message: str) -> None:
    # A closed stream or a terminal that is gone must not end the training, no more than it does for a logger.
    with contextlib.suppress(OSError, ValueError):
        print(message, flush=True)


class StepMonitor:
    """Used by the training thread."""

    def __init__(self) -> None:
        self._samples: int | None = None  # of the last step, if its figures are still to be written

    def step_done(self, deepspeed_engine: Any) -> None:
        """A step is over, perhaps but for what continues in the background."""
        if deepspeed_engine is not None and deepspeed_engine.monitor.enabled and dist.get_rank() == 0:
            self._samples = samples_after_step(deepspeed_engine)

    def write(self, deepspeed_engine: Any, session: Session | None) -> None:
        """Writes the figures of the last step, once nothing of it continues. Does nothing the second time."""
        samples, self._samples = self._samples, None
        if samples is None or deepspeed_engine is None or session is None:
            return
        record = session.counters.last_step
        if record is not None:
            deepspeed_engine.monitor.write_events(monitor_events(record, session.stats(), samples))


def samples_after_step(deepspeed_engine: Any) -> int:
    """What ``global_samples`` will be, at which DeepSpeed's own events of the step are: it is raised only after the
    optimizer's step has returned."""
    return int(deepspeed_engine.global_samples + calls.step_samples(deepspeed_engine))


# For tencache watch and tencache trace


logger = logging.getLogger("DeepSpeed.tencache")

POLL_S = 0.25
"""Interval at which the connection of a trace's reader is polled."""

_ATTEMPTS = 3

_Seen = TypeVar("_Seen")


@dataclass(frozen=True, slots=True)
class _Observed:
    session: weakref.ref[Session]
    module: weakref.ref[Any]
    optimizer: weakref.ref[Any]


class Observatory:
    """The engines of this process, as others see them; there is one per process. Any thread may use it."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._engines: dict[int, _Observed] = {}
        self._numbers = itertools.count()
        self._channel: Channel | None = None  # while there is an engine
        self.run_id = ""
        """The same for all ranks of the job, and for no other job; "" before the first engine."""

    def add(self, session: Session, module: Any, optimizer: Any) -> None:
        """Makes an engine visible. Every rank of the job calls it, on the training thread.

        Args:
            session: of the engine.
            module: its model.
            optimizer: what DeepSpeed calls so; without an optimizer, its offload object.

        Raises:
            AgreementError: not all of them do.
        """
        if os.getpid() != self._pid:  # a forked child that trains independently
            self._reset()
        if not self.run_id:
            self.run_id = agreed("the identifier of the run", _new_run_id(), lambda ids: ids[0])
        with self._lock:
            number = next(self._numbers)
            self._engines[number] = _Observed(weakref.ref(session), weakref.ref(module), weakref.ref(optimizer))
            session.on_close(lambda stats: self._remove(number))
            if self._channel is None:
                try:
                    self._channel = Channel(self._answer)
                except (OSError, RuntimeError) as error:  # no folder, or no thread
                    logger.debug("`tencache watch` and `tencache trace` cannot reach this process: %s", error)

    def _remove(self, number: int) -> None:
        """Removes a destroyed engine; with the last one the socket closes."""
        with self._lock:
            self._engines.pop(number, None)
            channel = self._channel if not self._engines else None
            if channel is not None:
                self._channel = None
        if channel is not None:
            channel.close()

    def _open(self) -> dict[int, tuple[Session, Any, Any]]:
        """Session, module and optimizer of the engines that have not been destroyed, by number."""
        with self._lock:
            alive = {n: (each.session(), each.module(), each.optimizer()) for n, each in self._engines.items()}
        return {
            n: (session, module, optimizer)
            for n, (session, module, optimizer) in alive.items()
            if session is not None and not session.closed
        }

    def _engine(self, number: int) -> tuple[Session, Any, Any]:
        """One of them.

        Raises:
            TenCacheError: it was destroyed.
        """
        engine = self._open().get(number)
        if engine is None:
            raise TenCacheError(f"engine {number} was destroyed")
        return engine

    # Answers

    def _answer(self, request: dict[str, Any], client: Client) -> None:
        command = request.get("command")
        if command == "snapshot":
            client.send(self.snapshot())
        elif command == "trace":
            self._trace(request, client)
        elif command == "residency":
            client.send({"weights": self._residency(int(request["engine"]))})
        else:
            raise TenCacheError(f"there is no command {command!r} in this version of tencache_ds")

    def snapshot(self) -> dict[str, Any]:
        """The process and the figures of its engines, as JSON has it."""
        return {
            "pid": os.getpid(),
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "host": socket.gethostname(),
            "run_id": self.run_id,
            "program": sys.argv[0] if sys.argv else "",
            "device": get_accelerator().current_device_name(),
            "engines": [
                {
                    "number": number,
                    "steps": session.counters.n_steps,
                    "seconds_in_step": session.counters.seconds_in_step,
                    "stats": asdict(_retried(session.look)),
                }
                for number, (session, *_) in self._open().items()
            ],
        }

    def _residency(self, number: int) -> dict[str, Any]:
        """See :func:`residency`."""
        _, module, optimizer = self._engine(number)
        if module is None or optimizer is None:
            raise TenCacheError(f"the model of engine {number} is gone")
        return _retried(lambda: residency(module, optimizer))

    def _trace(self, request: dict[str, Any], client: Client) -> None:
        session, module, _ = self._engine(int(request["engine"]))
        after_step, n_steps = int(request["after_step"]), int(request["steps"])
        if session.counters.n_steps >= after_step:
            client.send({"late": session.counters.n_steps})
            return
        trace = StepTrace(session.counters, after_step, n_steps)
        tracing.begin(trace)
        try:
            client.send({"armed": session.counters.n_steps})
            while not trace.over.wait(POLL_S):
                if client.gone():
                    return
            if trace.failure:
                raise TenCacheError(trace.failure)
            for line in self.recording(trace, module).lines():
                client.send(line)
        finally:
            tracing.end(trace, "its reader is gone")

    def recording(self, trace: StepTrace, module: Any) -> RankRecording:
        """A trace that is over, as plain values."""
        return RankRecording(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pid=os.getpid(),
            host=socket.gethostname(),
            run_id=self.run_id,
            training_thread=trace.training_thread,
            steps=[asdict(step) for step in trace.steps],
            threads={str(thread): name for thread, name in trace.threads.items()},
            weights=_named(module, "named_parameters"),
            modules=_named(module, "named_modules"),
            n_dropped=trace.n_dropped,
            spans=list(trace.spans),
        )

    def module_of(self, session: Session) -> Any:
        """The model of an engine; None if it is gone."""
        return next((module for other, module, _ in self._open().values() if other is session), None)


observatory = Observatory()


def trace_to_file(session: Session, path: str | os.PathLike[str], steps: int) -> StepTrace:
    """See :func:`tencache_ds.trace`."""
    file = Path(os.fspath(path).replace("{rank}", str(dist.get_rank())))
    if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        raise ValueError(f"{file} cannot be written: name a file in an existing folder that is writable for this user")

    def finish(trace: StepTrace) -> None:
        if trace.failure:
            logger.warning("no trace was written to %s: %s", file, trace.failure)
            return
        # Not a daemon: a process that ends waits for its file. The module, for its names, is there as long.
        module = observatory.module_of(session)
        threading.Thread(target=write, args=(trace, module), name="tencache-trace").start()

    def write(trace: StepTrace, module: Any) -> None:
        try:
            write_trace(file, [observatory.recording(trace, module)])
        except OSError as error:
            logger.warning("the trace could not be written to %s: %s", file, error)

    trace = StepTrace(session.counters, session.counters.n_steps, steps, finish)
    tracing.begin(trace)
    return trace


def _retried(look: Callable[[], _Seen]) -> _Seen:
    """What a look gives that fails where weights or chunks come or go meanwhile."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(RuntimeError):
            return look()
    return look()


def _named(module: Any, names: str) -> dict[str, str]:
    """Names of a model's parameters or modules by DeepSpeed's identifiers."""
    by_id: dict[str, str] = {}
    if module is not None:
        with contextlib.suppress(RuntimeError):  # the model is being changed
            for name, each in getattr(module, names)():
                if hasattr(each, "ds_id"):
                    by_id.setdefault(str(each.ds_id), name or type(each).__name__)
    return by_id


def _new_run_id() -> str:
    """An identifier that is easy to type, after the launcher's if there is one."""
    given = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or ""
    given = re.sub(r"[^A-Za-z0-9_.]", "", given)[:24]
    own = secrets.token_hex(2)
    return f"{given}-{own}" if given and given != "none" else f"run-{own}"


def residency(module: Any, optimizer: Any) -> dict[str, dict[str, list[int]]]:
    """Bytes of this rank's shards. Any thread may look; what is being moved at that moment counts where it was, or
    where it goes.

    Args:
        module: the model.
        optimizer: its :class:`~tencache_ds.integration.stage3.TenCacheZeroOptimizer_Stage3`, or DeepSpeed's offload
            object where there is no optimizer.

    Returns:
        For each weight's name, in the order of the model, ``weights``, ``gradients`` and ``optimizer state`` as bytes
        by :class:`~tencache_ds.placement.places.Place`. State that DeepSpeed keeps itself is not included.

    Raises:
        RuntimeError: weights or chunks came or went meanwhile.
    """
    state = _state(optimizer)
    gradients = getattr(optimizer, "_gradients", None)
    result = {}
    for name, param in module.named_parameters():
        if not hasattr(param, "ds_tensor"):
            continue
        weight, gradient = [0] * len(Place), [0] * len(Place)
        weight[place_of(param)] = shard_nbytes(param)
        if gradients is not None and gradients.accumulates(param.ds_id):
            place = Place.GPU if gradients.on_device(param.ds_id) else Place.HOST
            gradient[place] = gradients.nbytes_of(param.ds_id)
        result[name] = {"weights": weight, "gradients": gradient, "optimizer state": [*map(round, state[param.ds_id])]}
    return result


def _state(optimizer: Any) -> defaultdict[int, list[float]]:
    """Bytes of optimizer state by place for each weight; a chunk's are divided by its elements."""
    by_key: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * len(Place))
    tier, weights = getattr(optimizer, "_state", None), getattr(optimizer, "_model_weights", None)
    if tier is not None and weights is not None:
        for index in range(len(optimizer.fp16_groups)):
            for chunk, place in zip(tier.chunks(index), tier.places(index), strict=True):
                per_element = tier.nbytes_of(chunk) / chunk.numel
                for key, numel in weights.elements_of(chunk):
                    by_key[key][place] += numel * per_element
    momentum = getattr(optimizer, "_momentum", None)
    if momentum is not None:
        for key, place, nbytes in momentum.residency():
            by_key[key][place] += nbytes
    return by_key
