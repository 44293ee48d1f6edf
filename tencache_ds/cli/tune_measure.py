# SPDX-License-Identifier: Apache-2.0
"""Measures one path for ``tencache tune``, with TenCache's backend and with DeepSpeed's ``aio_handle``: screening of
many settings, then finals.

[Note: noise] Disks, virtual ones above all, change their speed by the second. Slices of all settings therefore take
turns, and a setting beats the default only if it does so in every round (see :class:`~.tune_result.Choice`).

Requests go to extents of equal length that were written before. A buffer that becomes free is submitted again until the
time is over; then the requests in flight are waited for.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tencache_ds.cli.tune_result import LEAST_ROUNDS, Choice, Measured, PathResult
from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError, LockedMemoryError, StorageError
from tencache_ds.integration.config_checks import read_aio_section
from tencache_ds.io import BACKENDS, BackendSettings, Operation, Submission, Ticket, open_backend
from tencache_ds.memory import HostArena, Locking
from tencache_ds.planning.cores import LANES
from tencache_ds.profiling.filesystem import FileSystem, block_device_of, file_system_of
from tencache_ds.profiling.probe import Area, Kind, area_nbytes_for, fill_area, open_area

Settings = Mapping[str, "bool | int"]

STOCK_KNOBS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
_MIB = 1 << 20


def tencache_grid(backend: str) -> list[dict[str, bool | int]]:
    """Settings worth trying with a backend, the defaults first.

    Where the kernel gets requests in blocks, the size of these is what counts, and elsewhere that of the requests.
    """
    aio = read_aio_section({})
    fields = TenCacheConfig.model_fields
    default: dict[str, bool | int] = {
        "io_lanes": LANES,
        "io_request_size": fields["io_request_size"].default,
        "block_size": aio["block_size"],
        "queue_depth": aio["queue_depth"],
    }
    if not BACKENDS[backend].in_blocks:
        changes = [{"io_lanes": lanes, "io_request_size": size * _MIB} for lanes in (4, 8, 16) for size in (1, 4, 8)]
    else:
        changes = [
            {"queue_depth": 32},
            {"io_lanes": 4},
            {"io_lanes": 16},
            {"block_size": 4 * _MIB},
            {"block_size": _MIB // 4, "queue_depth": 32},
            {"io_lanes": 2, "queue_depth": 32},
            {"io_lanes": 4, "block_size": 4 * _MIB},
            {"io_lanes": 16, "block_size": _MIB // 4},
        ]
    return _distinct([default, *({**default, **change} for change in changes)])


def stock_grid(cores: int) -> list[dict[str, bool | int]]:
    """Settings worth trying with DeepSpeed's handle, its defaults first."""
    aio = read_aio_section({})
    default = {key: aio[key] for key in STOCK_KNOBS}
    changes: list[dict[str, bool | int]] = [
        {"intra_op_parallelism": 4},
        {"intra_op_parallelism": 8, "queue_depth": 32},
        {"intra_op_parallelism": 4, "queue_depth": 32},
        {"intra_op_parallelism": 4, "block_size": 4 * _MIB},
        {"intra_op_parallelism": 4, "queue_depth": 32, "single_submit": True},
        {"intra_op_parallelism": 4, "queue_depth": 32, "overlap_events": False},
    ]
    if cores >= 16:
        changes.append({"intra_op_parallelism": 16, "queue_depth": 32})
    return _distinct([default, *({**default, **change} for change in changes)])


def _distinct(grid: list[dict[str, bool | int]]) -> list[dict[str, bool | int]]:
    return [settings for index, settings in enumerate(grid) if settings not in grid[:index]]


def requests_on(area: Area, buffers: tuple[torch.Tensor, ...], n_written: int) -> Requests:
    """The transfers of every setting.

    Args:
        area: written as far as ``n_written`` requests.
        buffers: one aligned uint8 tensor of ``area.request_nbytes`` per request in flight, an even number.
        n_written: at least as many as there are buffers.
    """

    def place(extent: int) -> tuple[str, int]:
        fd, offset = area.place(extent)
        # The files have no names any more; this opens them again, for this process only.
        return f"/proc/self/fd/{fd}", offset

    return Requests(area.name, buffers, n_written // len(buffers) * len(buffers), place)


class TenCacheSession:
    """TenCache's backend as training opens it.

    Args:
        kind: of ``open_backend``.
        settings: keys of :func:`tencache_grid`.
        requests: files and buffers.
        buffers_are_pinned: whether they are page-locked.

    Raises:
        ConfigError: this backend cannot work here with these settings.
    """

    def __init__(self, kind: str, settings: Settings, requests: Requests, buffers_are_pinned: bool) -> None:
        self.requests = requests
        self.backend, self.reason = open_backend(
            kind,
            BackendSettings(
                buffers_are_pinned=buffers_are_pinned,
                n_lanes=settings["io_lanes"],
                request_nbytes=settings["io_request_size"],
                block_nbytes=settings["block_size"],
                queue_depth=settings["queue_depth"],
            ),
        )

    def transfer(self, kind: Kind, seconds: float) -> int:
        """Starts requests for ``seconds``, waits for all of them, and returns the bytes they moved.

        Raises:
            StorageError: a request failed or came back short; names the folder or file.
        """
        try:
            return keep_in_flight(self.requests, kind, seconds, self.start)
        except StorageError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            raise StorageError(
                error.operation, self.requests.name, error.offset, error.nbytes, cause, errno=error.errno
            ) from error

    def close(self) -> None:
        """Waits for the requests in flight and frees everything, including its own files."""
        self.backend.close()

    def start(self, operation: Operation, slot: int, extent: int) -> Ticket:
        """See :data:`Issue`."""
        return self.backend.submit(Submission(operation, *self.requests.place(extent), self.requests.buffers[slot]))


REQUEST_NBYTES = 8 << 20
"""Bytes submitted at once; the settings determine how they are split."""

MOST_IN_FLIGHT = 16
LEAST_IN_FLIGHT = 4
N_FILES = 8
FILL_SHARE = 0.15
SCREENING_SHARE = 0.35
SCREENING_ROUNDS = 2
N_CHALLENGERS = 2
"""Settings from each side that meet the default in the finals."""

_Key = tuple[str, int]
"""Side (``"tencache"`` or ``"stock"``) and index in its grid; 0 is the default."""


def measure_path(folder: Path, seconds: float, advance: Callable[[float], None] = lambda done: None) -> PathResult:
    """Measures the storage under ``folder`` in about ``seconds``, longer only where the device needs it for a few
    requests, or where an operator is compiled for the first time.

    Its files have no names once they are open, so that nothing is left behind, even if the process is killed. Takes 256
    MiB of memory. Call it from one thread, while nothing else uses the device.

    Args:
        folder: existing folder.
        seconds: time for it.
        advance: is called now and then with the fraction that is done.

    Raises:
        ConfigError: the folder cannot be measured, or its device needs a larger alignment than 4096; gives the remedy.
        StorageError: an I/O request failed.
    """
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds must be a positive number, not {seconds}")
    area_nbytes = area_nbytes_for(folder, seconds, REQUEST_NBYTES)
    device = block_device_of(folder)
    if device is not None:
        device.check_alignment(folder)
    with ExitStack() as stack:
        area = stack.enter_context(open_area(folder, area_nbytes, REQUEST_NBYTES, N_FILES))
        slab, unlocked = open_buffer(stack, MOST_IN_FLIGHT * REQUEST_NBYTES)
        buffers = slab.split(REQUEST_NBYTES)
        # Compiles the ops before the clock starts, and determines the backend.
        everything = requests_on(area, buffers, MOST_IN_FLIGHT)
        best = next(iter(BACKENDS))
        first = TenCacheSession("auto", tencache_grid(best)[0], everything, not unlocked)
        backend, reason = first.backend.name, first.reason
        first.close()
        stock_absent = _why_no_stock(area.direct, unlocked)

        start = time.perf_counter()
        n_written = fill_area(area, start + FILL_SHARE * seconds)
        filled_bytes_per_s = n_written * REQUEST_NBYTES / (time.perf_counter() - start)
        in_flight = _in_flight(filled_bytes_per_s, SCREENING_SHARE * seconds / 36, n_written)
        requests = requests_on(area, buffers[:in_flight], n_written)
        sides: dict[str, tuple[list[dict[str, bool | int]], Callable[[Settings], Session]]] = {
            "tencache": (
                tencache_grid(backend),
                lambda settings: TenCacheSession(backend, settings, requests, not unlocked),
            )
        }
        if not stock_absent:
            cores = len(os.sched_getaffinity(0))
            sides["stock"] = (stock_grid(cores), lambda settings: StockSession(settings, requests))
        sessions, notes = _open(stack, sides)
        mixed = _screen(sessions, start, seconds, advance)
        finalists = _finalists(mixed)
        finals = _play({key: sessions[key] for key in finalists}, start, seconds, advance)
        choices = {side: _choice(side, grid, mixed, finals) for side, (grid, _) in sides.items()}
    system = file_system_of(folder)
    warnings = warnings_of(folder, system, area.direct)
    if backend != best:
        warnings.append(f'"io_backend": "auto" selects {backend} here: {reason}')
    return PathResult(
        path=str(folder),
        measured_at=datetime.now(timezone.utc).replace(microsecond=0),
        seconds=seconds,
        filesystem=system.kind,
        device=device.name if device is not None else "",
        disks_nbytes=device.disks_nbytes if device is not None else 0,
        logical_block_nbytes=device.logical_block_nbytes if device is not None else None,
        physical_block_nbytes=device.physical_block_nbytes if device is not None else None,
        direct=area.direct,
        request_nbytes=REQUEST_NBYTES,
        in_flight=in_flight,
        backend=backend,
        backend_reason=reason,
        tencache=choices["tencache"],
        stock=choices.get("stock"),
        notes=tuple([*notes, f"stock was not measured: {stock_absent}"] if stock_absent else notes),
        warnings=tuple(warnings),
    )


def warnings_of(folder: Path, system: FileSystem, direct: bool) -> list[str]:
    """Warnings about this storage."""
    warnings = []
    if system.in_memory:
        warnings.append(f"{folder} is on {system.kind}: RAM, not a disk. At best it imitates a fast array.")
    if system.over_network:
        warnings.append(f"{folder} is on {system.kind}, over a network: every rank and user of it shares these rates.")
    if not direct:
        warnings.append(
            f"{folder} refuses O_DIRECT: data goes through the page cache, which costs RAM and time, and these figures "
            "are a guess. Name a folder on ext4 or xfs."
        )
    return warnings


def _why_no_stock(direct: bool, unlocked: str) -> str:
    """Why DeepSpeed's handle cannot be measured here; empty if it can."""
    if not direct:
        return "DeepSpeed's aio_handle needs O_DIRECT"
    if unlocked:
        return f"its buffers must be locked, which failed: {unlocked}"
    from tencache_ds.ops.async_io import load_async_io

    try:
        load_async_io()
    except ConfigError as error:
        return str(error)
    return ""


def _in_flight(bytes_per_s: float, slice_s: float, n_written: int) -> int:
    """Buffers, as many as move in half a slice, so that waiting for the last does not take most of the time."""
    wanted = int(bytes_per_s * slice_s / 2 / REQUEST_NBYTES)
    return max(2, min(MOST_IN_FLIGHT, max(LEAST_IN_FLIGHT, wanted), n_written) // 2 * 2)


def _open(
    stack: ExitStack, sides: dict[str, tuple[list[dict[str, bool | int]], Callable[[Settings], Session]]]
) -> tuple[dict[_Key, Session], list[str]]:
    """All prepared settings, the defaults first; and messages about settings that cannot be tried."""
    sessions: dict[_Key, Session] = {}
    notes: list[str] = []
    keys = [(side, index) for side, (grid, _) in sides.items() for index in range(len(grid))]
    for side, index in sorted(keys, key=lambda key: key[1]):
        grid, opened = sides[side]
        try:
            session = opened(grid[index])
        except ConfigError as error:
            if index == 0:
                raise
            notes.append(f"{side} with {grid[index]} was not tried: {error}")
            continue
        stack.callback(session.close)
        sessions[side, index] = session
    return sessions, notes


def _screen(
    sessions: dict[_Key, Session], start: float, seconds: float, advance: Callable[[float], None]
) -> dict[_Key, float]:
    """Mixed rate of each setting, as far as the time goes: the defaults always."""
    deadline = start + (FILL_SHARE + SCREENING_SHARE) * seconds
    slices = [key for number in range(SCREENING_ROUNDS) for key in _in_turn(sessions, number)]
    samples: dict[_Key, list[float]] = {}
    for index, key in enumerate(slices):
        left_s = deadline - time.perf_counter()
        if left_s <= 0 and all(default in samples for default in sessions if default[1] == 0):
            break
        samples.setdefault(key, []).append(_rate(sessions[key], Kind.MIXED, max(0.0, left_s) / (len(slices) - index)))
        advance(min(1.0, (time.perf_counter() - start) / seconds))
    return {key: statistics.median(rates) for key, rates in samples.items()}


def _finalists(mixed: dict[_Key, float]) -> list[_Key]:
    """The default of each side and its fastest challengers."""
    keys: list[_Key] = []
    for side in dict.fromkeys(key[0] for key in mixed):
        others = sorted((key for key in mixed if key[0] == side and key[1]), key=lambda key: -mixed[key])
        keys += [(side, 0), *others[:N_CHALLENGERS]]
    return keys


def _play(
    sessions: dict[_Key, Session], start: float, seconds: float, advance: Callable[[float], None]
) -> list[dict[tuple[_Key, Kind], float]]:
    """Rates of each round. One round always, then as many as the time allows."""
    deadline = start + seconds
    n_slices = len(Kind) * len(sessions)
    rounds: list[dict[tuple[_Key, Kind], float]] = []
    for number in range(LEAST_ROUNDS):
        t_round = time.perf_counter()
        rates: dict[tuple[_Key, Kind], float] = {}
        for kind, key in product(Kind, _in_turn(sessions, number)):
            n_left = n_slices * (LEAST_ROUNDS - number) - len(rates)
            slice_s = max(0.0, deadline - time.perf_counter()) / n_left
            rates[key, kind] = _rate(sessions[key], kind, slice_s)
            advance(min(1.0, (time.perf_counter() - start) / seconds))
        rounds.append(rates)
        took_s = time.perf_counter() - t_round
        if time.perf_counter() + took_s > deadline + 0.2 * seconds:
            break
    return rounds


def _in_turn(sessions: dict[_Key, Session], number: int) -> list[_Key]:
    """All settings, beginning with another one each round: after a slice of another kind the first is at a loss."""
    keys = list(sessions)
    return keys[number % len(keys) :] + keys[: number % len(keys)]


def _rate(session: Session, kind: Kind, seconds: float) -> float:
    start = time.perf_counter()
    n_moved = session.transfer(kind, seconds)
    return n_moved / (time.perf_counter() - start)


def _choice(
    side: str,
    grid: list[dict[str, bool | int]],
    mixed: dict[_Key, float],
    finals: list[dict[tuple[_Key, Kind], float]],
) -> Choice:
    tried = []
    for index, settings in enumerate(grid):
        key = (side, index)
        if key not in mixed:
            continue
        if (key, Kind.READ) not in finals[0]:
            tried.append(Measured(settings=settings, mixed_bytes_per_s=mixed[key]))
            continue
        medians = {kind: statistics.median(rates[key, kind] for rates in finals) for kind in Kind}
        tried.append(
            Measured(
                settings=settings,
                read_bytes_per_s=medians[Kind.READ],
                write_bytes_per_s=medians[Kind.WRITE],
                mixed_bytes_per_s=medians[Kind.MIXED],
                rounds=tuple(statistics.harmonic_mean([rates[key, kind] for kind in Kind]) for rates in finals),
            )
        )
    return Choice(tried=tuple(tried))


# Loops that keep storage busy


TIMEOUT_S = 120.0
"""A request that takes longer is an error."""

_HANDLE_ARGUMENTS = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests, the same for all candidates.

    Attributes:
        name: the folder or file, for messages.
        buffers: one aligned uint8 tensor per request in flight, all of one length.
        n_extents: a multiple of the number of buffers: buffer ``i`` only ever goes to extents ``i`` modulo that number,
            so that no two requests in flight meet.
        place: path and offset of an extent.
    """

    name: str
    buffers: tuple[torch.Tensor, ...]
    n_extents: int
    place: Callable[[int], tuple[str, int]]

    @property
    def request_nbytes(self) -> int:
        """Length of a request."""
        return self.buffers[0].numel()

    def extent(self, slot: int, turn: int) -> int:
        """The extent that buffer ``slot`` goes to at its ``turn``-th request: together they walk through all."""
        return (turn * len(self.buffers) + slot) % self.n_extents


def open_buffer(stack: ExitStack, nbytes: int) -> tuple[torch.Tensor, str]:
    """Random bytes in aligned memory, locked if that is possible, as in training; why it is not, or an empty string."""
    why = ""
    for locking in (Locking.CUDA if torch.cuda.is_available() else Locking.MLOCK, Locking.NONE):
        with ExitStack() as attempt:
            try:
                arena = HostArena(None, locking)
                attempt.callback(arena.close)
                slab = arena.allocate(nbytes, "storage benchmark")
            except (LockedMemoryError, ConfigError) as error:
                if locking is Locking.NONE:
                    raise
                why = str(error)
                continue
            stack.push(attempt.pop_all())
            # Compressible data would flatter a device that compresses.
            slab.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
            return slab, why
    raise RuntimeError("neither locked nor plain memory was tried")


def operation_of(kind: Kind, slot: int) -> Operation:
    """Operation of the buffer at index ``slot``: when mixed, every other one writes."""
    if kind is Kind.MIXED:
        return Operation.WRITE if slot % 2 else Operation.READ
    return Operation(kind.value)


Issue = Callable[[Operation, int, int], Ticket]
"""``issue(operation, slot, extent)``: starts one request."""


def keep_in_flight(requests: Requests, kind: Kind, seconds: float, issue: Issue) -> int:
    """A request for each buffer, and the next one as soon as the oldest has ended, for ``seconds``; one thread.

    Returns:
        The bytes that were moved.

    Raises:
        StorageError: a request failed, or took longer than ``TIMEOUT_S``.
    """

    def start(slot: int, turn: int) -> tuple[int, int, Ticket]:
        return slot, turn, issue(operation_of(kind, slot), slot, requests.extent(slot, turn))

    end_s = time.perf_counter() + seconds
    n_moved = 0
    pending = deque(start(slot, 0) for slot in range(len(requests.buffers)))
    while pending:
        slot, turn, ticket = pending.popleft()
        ticket.wait(TIMEOUT_S)
        n_moved += ticket.nbytes
        if time.perf_counter() < end_s:
            pending.append(start(slot, turn + 1))
    return n_moved


def open_stock_handle(settings: Mapping[str, bool | int]) -> Any:
    """An ``aio_handle``.

    Args:
        settings: of DeepSpeed's ``aio`` section: all but ``use_gds``.

    Raises:
        ConfigError: DeepSpeed's op cannot be built or loaded.
    """
    from tencache_ds.ops.async_io import load_async_io

    return load_async_io().aio_handle(*(settings[key] for key in _HANDLE_ARGUMENTS))


class StockSession:
    """One ``aio_handle`` the way DeepSpeed's swappers use it: a batch of asynchronous requests, then ``wait()``.

    Args:
        settings: see :func:`open_stock_handle`.
        requests: with page-locked buffers; the handle would copy others.

    Raises:
        ConfigError: DeepSpeed's op cannot be built or loaded.
    """

    def __init__(self, settings: Mapping[str, bool | int], requests: Requests) -> None:
        self._requests = requests
        self.handle: Any = open_stock_handle(settings)

    def transfer(self, kind: Kind, seconds: float) -> int:
        """See :meth:`TenCacheSession.transfer`."""
        requests = self._requests
        end_s = time.perf_counter() + seconds
        n_moved, turn = 0, 0
        while True:
            for slot, buffer in enumerate(requests.buffers):
                is_read = operation_of(kind, slot) is Operation.READ
                start = self.handle.async_pread if is_read else self.handle.async_pwrite
                start(buffer, *requests.place(requests.extent(slot, turn)))
            n_done = self.handle.wait()
            if n_done != len(requests.buffers):
                cause = f"aio_handle.wait() reports {n_done} of {len(requests.buffers)} requests as completed"
                raise StorageError(kind.value, requests.name, 0, requests.request_nbytes, cause)
            n_moved += n_done * requests.request_nbytes
            turn += 1
            if time.perf_counter() >= end_s:
                return n_moved

    def close(self) -> None:
        """See :meth:`TenCacheSession.close`."""
        self.handle = None


Session = TenCacheSession | StockSession
"""One of the compared backends, ready for use. Used by one thread."""
