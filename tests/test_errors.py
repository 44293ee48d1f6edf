# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import pickle
import subprocess
import sys

import pytest

from tencache_ds import errors
from tencache_ds.errors import (
    ConfigError,
    CorruptionError,
    InstallationError,
    LockedMemoryError,
    MemoryLimitError,
    ProcessLimitError,
    SeamError,
    SpaceError,
    StorageError,
    TenCacheError,
    add_note,
)

STORAGE_ERRORS = [StorageError, CorruptionError, SpaceError]


def test_one_base_class_catches_all():
    raised = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(raised) >= 8
    assert all(issubclass(kind, TenCacheError) for kind in raised)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (SeamError, RuntimeError),
        (InstallationError, ImportError),
        (ProcessLimitError, RuntimeError),
        (MemoryLimitError, MemoryError),
        (LockedMemoryError, MemoryLimitError),
        (StorageError, OSError),
        (CorruptionError, StorageError),
        (SpaceError, StorageError),
    ],
)
def test_code_that_expects_the_builtin_error_catches_it(kind, builtin):
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("kind", STORAGE_ERRORS)
def test_a_storage_error_says_what_failed_where(kind):
    error = kind(
        "read", "/scratch/weights.bin", 8192, 4096, "Input/output error", errno=errno.EIO, tag="layer.0.weight"
    )
    for part in ("read", "layer.0.weight", "/scratch/weights.bin", "8192", "4096", "Input/output error", "errno 5"):
        assert part in str(error)
    assert (error.operation, error.path, error.offset, error.nbytes, error.tag, error.errno) == (
        "read",
        "/scratch/weights.bin",
        8192,
        4096,
        "layer.0.weight",
        errno.EIO,
    )


def test_a_storage_error_without_errno_or_tag_does_not_mention_them():
    error = StorageError("write", "/scratch/w.bin", 0, 1, "the store is closed")
    assert str(error) == "write failed at /scratch/w.bin, offset 0, 1 bytes: the store is closed"
    assert error.errno is None


@pytest.mark.parametrize("kind", STORAGE_ERRORS)
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), StorageError.copied])
def test_a_storage_error_survives_copying(kind, copied):
    error = kind("read", "/scratch/weights.bin", 8192, 4096, "Input/output error", errno=errno.EIO, tag="a")
    add_note(error, "a remedy")
    again = copied(error)
    assert again is not error
    assert (type(again), str(again), again.args, again.errno) == (kind, str(error), error.args, errno.EIO)
    assert vars(again) == vars(error)
    add_note(again, "another one")
    assert error.__notes__ == ["a remedy"]


NOTED = {
    "ours": "TenCacheError('what is wrong')",
    "storage": "StorageError('read', '/scratch/w.bin', 0, 1, 'what is wrong')",
    "a copy": "pickle.loads(pickle.dumps(noted(StorageError('read', '/scratch/w.bin', 0, 1, 'what is wrong'))))",
    "of the system": "OSError(28, 'what is wrong', '/scratch/w.bin')",
    "of no text": "ValueError(b'what is wrong')",
}


@pytest.mark.parametrize("made", NOTED.values(), ids=NOTED)
def test_a_note_reaches_the_user(made: str) -> None:
    """On Python 3.10 as well, where the interpreter prints no notes."""
    lines = [
        "import pickle, warnings",
        "from tencache_ds.errors import StorageError, TenCacheError, add_note",
        "def noted(error):",
        "    add_note(error, 'a remedy')",
        "    return error",
        f"error = {made}",
        "raise error if hasattr(error, '__notes__') else noted(error)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("a remedy") == 1
    assert "what is wrong" in done.stderr


def test_a_copied_error_keeps_its_reason_and_not_its_traceback():
    reason = OSError("reason")
    with pytest.raises(StorageError) as raised:
        raise StorageError("read", "/scratch/weights.bin", 0, 1, "cause") from reason
    again = raised.value.copied()
    assert again.__traceback__ is None
    assert again.__cause__ is reason
    assert again.__suppress_context__


@pytest.mark.parametrize("kind", [TenCacheError, ConfigError, SeamError, MemoryLimitError])
def test_plain_errors_survive_pickling(kind):
    copy = pickle.loads(pickle.dumps(kind("what is wrong")))
    assert type(copy) is kind
    assert str(copy) == "what is wrong"
