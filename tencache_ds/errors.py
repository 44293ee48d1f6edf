# SPDX-License-Identifier: Apache-2.0
"""Every error TenCache raises on purpose.

Each one names what is wrong and the remedy. Catching :class:`TenCacheError` catches all of them.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


_Part = TypeVar("_Part")


class TenCacheError(Exception):
    """Base class of every error raised by TenCache."""


class ConfigError(TenCacheError, ValueError):
    """The DeepSpeed config cannot be run with TenCache: names the key, the given value and the allowed ones."""


class InstallationError(TenCacheError, ImportError):
    """A config selects TenCache, but a part of it or one of its requirements cannot be imported: names that part."""


class ProcessLimitError(TenCacheError, RuntimeError):
    """A limit of this process, user or container is too low: names the amount needed, the limit and how to raise it."""


class SeamError(TenCacheError, RuntimeError):
    """The installed DeepSpeed does not have a seam TenCache plugs into: names the version and the seam."""


class AgreementError(TenCacheError, RuntimeError):
    """Ranks differ in something that must be the same on all of them: names it, the ranks and their values."""


class MemoryLimitError(TenCacheError, MemoryError):
    """A pinned-memory plan does not fit its limit: names the amount needed, the limit and the option to change."""


class LockedMemoryError(MemoryLimitError):
    """The operating system refused to lock or register host memory."""


class StorageError(TenCacheError, OSError):
    """A read or write of scratch storage failed or came back short.

    Attributes:
        path: the file.
        offset: first byte of the request in that file.
        nbytes: length of the request in bytes.
        operation: ``"read"``, ``"write"`` or another verb such as ``"allocate"``.
        tag: name of the weight or chunk, if known.
    """

    def __init__(
        self,
        operation: str,
        path: str,
        offset: int,
        nbytes: int,
        cause: str,
        *,
        errno: int | None = None,
        tag: str = "",
    ) -> None:
        what = f" of {tag}" if tag else ""
        number = f" (errno {errno})" if errno is not None else ""
        super().__init__(errno, f"{operation}{what} failed at {path}, offset {offset}, {nbytes} bytes: {cause}{number}")
        self.operation = operation
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.tag = tag

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> tuple[Any, ...]:
        """For :mod:`copy` and :mod:`pickle`, which would call the constructor with ``args``."""
        return _restored, (type(self), self.args, dict(self.__dict__))

    def copied(self) -> Self:
        """The same error without a traceback, to raise one that is kept.

        A traceback holds the frames that the error has passed through, and they their variables: an error kept in a
        file's record would hold the engine of its catcher.
        """
        error = copy.copy(self)
        if hasattr(self, "__notes__"):
            error.__notes__ = list(self.__notes__)
        error.__cause__, error.__context__ = self.__cause__, self.__context__
        error.__suppress_context__ = self.__suppress_context__
        return error


def _restored(kind: type[StorageError], arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> StorageError:
    error = kind.__new__(kind)
    OSError.__init__(error, *arguments)
    error.__dict__.update(attributes)
    return error


class CorruptionError(StorageError):
    """Bytes read back differ from the bytes last written to the same place."""


class SpaceError(StorageError):
    """Too little free space for the state to be stored: detected before training starts."""


class CheckpointError(TenCacheError, RuntimeError):
    """A checkpoint could not be saved or loaded: names it, the reason, and the rank that detected it."""


class VoidStepError(TenCacheError, RuntimeError):
    """An optimizer step, or a load, failed after it had begun to change weights and optimizer states: says why, and how
    to replace them. See [Note: whole or void] in :mod:`tencache_ds.runtime.step_guard`."""


class InplaceChangeError(TenCacheError, RuntimeError):
    """A tensor that backward needs was modified in place after the forward pass had saved it; autograd raises a
    ``RuntimeError`` for the same reason: names the tensor and both versions."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, which Python prints below the error. Python 3.10 prints none: there the message ends with it, and
    where an error has no message that could be changed, a warning says it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
        return
    error.__notes__ = [*getattr(error, "__notes__", ()), note]
    for index, argument in enumerate(error.args):
        if isinstance(argument, str):
            text = f"{argument}\n{note}"
            error.args = (*error.args[:index], text, *error.args[index + 1 :])
            if isinstance(error, OSError) and error.strerror == argument:  # which its message is made of
                error.strerror = text
            return
    warnings.warn(note, stacklevel=2)


def built(part: _Part | None) -> _Part:
    """A part of an engine that others are made of, or used with: what uses it is called once it is there.

    Raises:
        TenCacheError: it is not.
    """
    if part is None:
        raise TenCacheError("a part of an engine is used that it does not have, or not yet: report this with the stack")
    return part


def named_ranks(ranks: Sequence[int], most: int | None = None) -> str:
    """Ranks in a message; of more than ``most``, if that is given, how many more there are."""
    shown = ranks if most is None else ranks[:most]
    more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}{more}"
