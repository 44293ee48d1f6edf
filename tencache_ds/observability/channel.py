# SPDX-License-Identifier: Apache-2.0
"""Answers questions of the ``tencache`` command about this process, over a Unix socket.

A thread sleeps in ``accept()``; each connection gets its own thread for as long as it lasts. Nothing here can slow
or end the training: without a folder for the socket there is no channel, a forked child closes its copy, a client that
sends garbage or nothing is dropped, and whatever an answer raises goes to the client.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tencache_ds.errors import TenCacheError
from tencache_ds.observability.channel_client import address, folders, opened, remove, remove_stale

logger = logging.getLogger("DeepSpeed.tencache")

REQUEST_NBYTES = 4096
MAX_CLIENTS = 8
REQUEST_TIMEOUT_S = 5.0
"""For the question, which is one line."""

REPLY_TIMEOUT_S = 30.0
"""For a client to take a part of the answer."""


class Client:
    """Who asked. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, line: dict[str, Any]) -> None:
        """Sends a part of the answer.

        Raises:
            OSError: the client is gone, or does not read.
        """
        self._connection.sendall(json.dumps(line).encode() + b"\n")

    def gone(self) -> bool:
        """Whether the client has closed its end."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True


Answer = Callable[[dict[str, Any], Client], None]
"""Answers a request, in a separate thread; may take long."""


class Channel:
    """The socket of this process, until :meth:`close` or the end of the process.

    Args:
        answer: called for each question.

    Raises:
        OSError: no folder can hold the socket.
        RuntimeError: there is no thread to be had.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._pid = os.getpid()
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._name = f"{self._pid}-{secrets.token_hex(4)}.sock"
        self._listener, self._folder = _listen(self._name)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tencache-channel", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._closed = True
            self._listener.close()
            raise
        atexit.register(self.close)
        _channels.add(self)

    @property
    def path(self) -> Path:
        """Where the socket is."""
        return self._folder / self._name

    def close(self) -> None:
        """Removes the socket and ends the thread. Idempotent; a forked child leaves both to its parent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(OSError), opened(self._folder) as descriptor:
            remove(descriptor, self._name)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(timeout=1.0)
        self._listener.close()

    def _leave_to_parent(self) -> None:
        if not self._closed:
            self._closed = True
            self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.1)  # out of descriptors for a moment
                continue
            while not self._slots.acquire(timeout=0.2):  # the next ones wait in the kernel's queue
                if self._closed:
                    connection.close()
                    return
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="tencache-channel-client", daemon=True
                ).start()
            except RuntimeError:  # no thread to be had
                self._slots.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(REQUEST_TIMEOUT_S)
                if _user_of(connection) not in (os.geteuid(), 0):
                    return
                request = _read_request(connection)
                connection.settimeout(REPLY_TIMEOUT_S)
                client = Client(connection)
                if request is None:
                    client.send({"error": "not a question: one JSON object on one line is"})
                    return
                try:
                    self._answer(request, client)
                except OSError:
                    raise
                except TenCacheError as error:
                    client.send({"error": str(error)})
                except Exception as error:  # reported to the client; training is not affected
                    client.send({"error": f"{type(error).__name__}: {error}"})
        except OSError as error:
            logger.debug("a client of the channel was dropped: %s", error)
        finally:
            self._slots.release()


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for channel in list(_channels):
        channel._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)  # once: nothing can be taken off again


def _listen(name: str) -> tuple[socket.socket, Path]:
    """A listening socket in the first folder that takes it."""
    failure: OSError | None = None
    for folder in folders():
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with opened(folder, create=True) as descriptor:
                remove_stale(descriptor)
                # It gets its name when it can be connected to: until then it would look like a dead process's.
                listener.bind(address(descriptor, f"{name}.new"))
                os.chmod(address(descriptor, f"{name}.new"), 0o600)
                listener.listen(MAX_CLIENTS)
                os.rename(f"{name}.new", name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            return listener, folder
        except OSError as error:
            listener.close()
            failure = failure or error
    assert failure is not None
    raise failure


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _read_request(connection: socket.socket) -> dict[str, Any] | None:
    """A question; None if it is none. An OSError if it does not come."""
    data = b""
    while b"\n" not in data:
        part = connection.recv(REQUEST_NBYTES)
        if not part or len(data) + len(part) > REQUEST_NBYTES:
            return None
        data += part
    try:
        request = json.loads(data.partition(b"\n")[0])
    except ValueError:
        return None
    return request if isinstance(request, dict) else None
