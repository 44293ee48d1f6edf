# SPDX-License-Identifier: Apache-2.0
"""Locks of torch's extension builder that a killed process leaves behind.

A process that loads an op creates the file ``lock`` in its build folder, keeps it open, and removes it at the end. A
process that is killed meanwhile leaves the file there, and every later load of the op then hangs silently. TenCache's
own ops are loaded under a lock that ends with its process, so a leftover of torch's can be removed; for DeepSpeed's
ops, which others load as well, a message names the lock. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tencache_ds.profiling.host import machine_identity

logger = logging.getLogger("DeepSpeed.tencache.ops")

PATIENCE_S = 10.0
"""Loading an op that is built takes a second or two."""

POLL_S = 1.0
"""Interval between two checks of the files that are being compiled."""

_NAME_FLAG = "-DTORCH_EXTENSION_NAME="
_SOURCE_SUFFIXES = (".cpp", ".cc", ".c", ".cu")


def extension_root() -> Path:
    """The folder in which torch builds extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def build_locks(op_name: str = "*") -> list[Path]:
    """Locks that exist now, of one op or all. Below the root there may be a folder per version of Python and CUDA."""
    root = extension_root()
    return sorted([*root.glob(f"{op_name}/lock"), *root.glob(f"*/{op_name}/lock")])


def is_held(lock: Path) -> bool:
    """Whether a process that can be looked at here has the file open: same machine, same user."""
    try:
        wanted = lock.stat()
    except OSError:
        return False  # removed meanwhile
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            for descriptor in process.iterdir():
                with contextlib.suppress(OSError):
                    status = descriptor.stat()
                    if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
                        return True
    return False


def remedy(lock: Path) -> str:
    """The remedy for a stale lock."""
    return f"rm {lock} (unless another machine that shares this folder is building right now)"


def explain(lock: Path) -> str:
    """Why loading an op takes so long."""
    op_name = lock.parent.name
    if is_held(lock):
        return f"the {op_name} op is being built, which can take some minutes (lock: {lock})"
    return f"the {op_name} op waits for a lock that a killed process left behind; to continue: {remedy(lock)}"


@contextlib.contextmanager
def only_loader(op_name: str) -> Iterator[None]:
    """Around the loading of an op that is only ever loaded so: one process at a time, and no lock of a killed one.

    Which machine loads is written down, because a file system need not carry locks between machines: a lock that
    another one may have left stays. Does nothing where no file can be created or locked.
    """
    this_machine = machine_identity()
    with contextlib.ExitStack() as stack:
        try:
            extension_root().mkdir(parents=True, exist_ok=True)
            record = stack.enter_context(open(extension_root() / f"{op_name}.loader", "a+"))
            fcntl.lockf(record, fcntl.LOCK_EX)  # ends with the process, and forked children do not have it
            record.seek(0)
            machine = record.read()
            if machine == this_machine:
                remove_left_behind(op_name)
            elif not machine:
                record.write(this_machine)
                record.flush()
            if machine in ("", this_machine):
                stack.callback(record.truncate, 0)
        except OSError as error:
            logger.debug("the %s op is loaded without a lock: %s", op_name, error)
        yield


def remove_left_behind(op_name: str = "*") -> None:
    """Removes the locks of one op or all that no process on this machine holds. Only where no other machine builds."""
    for lock in build_locks(op_name):
        if not is_held(lock):
            logger.info("removes %s, left behind by a killed process", lock)
            lock.unlink(missing_ok=True)


def files_being_compiled() -> set[tuple[str, str]]:
    """Op and source file of each compiler that this process has started and that is running."""
    files = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended
            argv = child.cmdline()
            ops = [word.removeprefix(_NAME_FLAG) for word in argv if word.startswith(_NAME_FLAG)]
            files |= {(op, Path(word).name) for op in ops[:1] for word in argv if word.endswith(_SOURCE_SUFFIXES)}
    return files


@contextlib.contextmanager
def told_what_takes_so_long(op_name: str, patience_s: float = PATIENCE_S, poll_s: float = POLL_S) -> Iterator[None]:
    """Around the loading of an op: logs each source file when its compilation begins, and the seconds at the end. If
    instead another process holds the op's lock for ``patience_s`` seconds, logs that, once."""
    over = threading.Event()
    begun = time.monotonic()
    told: set[tuple[str, str]] = set()

    def tell() -> None:
        explained = False
        while not over.wait(poll_s):
            new = files_being_compiled() - told
            told.update(new)
            for op, file in sorted(new):
                logger.warning("compiling the %s op, once: %s (%.0f s so far)", op, file, time.monotonic() - begun)
            if not (told or explained) and time.monotonic() - begun >= patience_s:
                explained = True
                for lock in build_locks(op_name):
                    logger.warning("%s", explain(lock))

    teller = threading.Thread(target=tell, name="tencache-op-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        if told:
            logger.warning("the %s op is compiled, after %.0f s", op_name, time.monotonic() - begun)
