# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tencache_ds.errors import TenCacheError
from tencache_ds.observability import channel as channel_module
from tencache_ds.observability import channel_client
from tencache_ds.observability.channel import Channel, Client
from tencache_ds.observability.channel_client import Endpoint, endpoints, jobs, select

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of this test's own, with a path that is too long for a socket."""
    path = tmp_path / ("x" * 120) / "tencache"
    path.parent.mkdir()
    for module in (channel_module, channel_client, channel_client):
        monkeypatch.setattr(module, "folders", lambda: [path])
    return path


def answer(request: dict[str, Any], client: Client) -> None:
    if request["command"] == "fail":
        raise ValueError("made up")
    if request["command"] == "refuse":
        raise TenCacheError("not now")
    if request["command"] == "wait":
        while not client.gone():
            time.sleep(0.01)
        gone.append(os.getpid())
        return
    for number in range(3):
        client.send({"number": number})


gone: list[int] = []


@pytest.fixture
def channel() -> Iterator[Channel]:
    server = Channel(answer)
    yield server
    server.close()


def ask(command: str, endpoint: Endpoint | None = None) -> list[dict[str, Any]]:
    (result,) = [endpoint] if endpoint else endpoints()
    return list(result.ask({"command": command}, 5.0))


def test_a_question_is_answered_and_only_its_user_may_ask(channel: Channel, folder: Path):
    assert ask("count") == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(channel.path.lstat().st_mode) == 0o600
    assert endpoints()[0].pid == os.getpid()


def test_nothing_keeps_a_closed_channel():
    servers = [Channel(answer) for _ in range(3)]
    references = [weakref.ref(server) for server in servers]
    for server in servers:
        server.close()
    del server, servers
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_an_error_of_the_answer_reaches_the_one_who_asked(channel: Channel):
    with pytest.raises(TenCacheError, match="ValueError: made up"):
        ask("fail")
    with pytest.raises(TenCacheError, match=r"process \d+: not now"):
        ask("refuse")
    assert len(ask("count")) == 3


@pytest.mark.parametrize("garbage", [b"", b"\n", b"\xff\xfe\n", b"[1]\n", b"{", b"x" * 100_000])
def test_garbage_is_refused(channel: Channel, garbage: bytes):
    with channel_client.opened(channel.path.parent) as descriptor:
        connection = channel_client.connect(descriptor, channel.path.name, 1.0)
        assert connection is not None
        with connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(5.0)
                reply = connection.recv(1000)
            except OSError:  # dropped while it was still sending
                reply = b""
    assert reply == b"" or b"error" in reply
    assert len(ask("count")) == 3


def test_clients_that_hang_are_dropped(channel: Channel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "REQUEST_TIMEOUT_S", 0.2)
    with channel_client.opened(channel.path.parent) as descriptor:
        silent = [channel_client.connect(descriptor, channel.path.name, 1.0) for _ in range(channel_module.MAX_CLIENTS)]
    t_end = time.monotonic() + 10
    while not (result := ask("count")) and time.monotonic() < t_end:  # all are served again when the silent are gone
        time.sleep(0.05)
    assert len(result) == 3
    for connection in silent:
        assert connection is not None
        connection.close()


def test_who_stops_waiting_is_noticed(channel: Channel):
    gone.clear()
    reply = endpoints()[0].ask({"command": "wait"}, 5.0)
    time.sleep(0.05)
    assert not gone
    reply.close()
    t_end = time.monotonic() + 5
    while not gone and time.monotonic() < t_end:
        time.sleep(0.01)
    assert gone == [os.getpid()]


def test_nothing_is_left_after_the_end(channel: Channel, folder: Path):
    (endpoint,) = endpoints()
    channel.close()
    channel.close()
    assert list(folder.iterdir()) == []
    assert ask("count", endpoint) == []


PROGRAM = """
import os, sys, time
from pathlib import Path
from tencache_ds.observability import channel
folder = Path(sys.argv[1])
channel.folders = lambda: [folder]
served = channel.Channel(lambda request, client: client.send({"rank": int(sys.argv[2])}))
if sys.argv[3] == "fork":
    child_is_there, tell = os.pipe()
    if os.fork() == 0:  # a data loader's worker, which outlives its parent
        served.close()  # changes nothing: it is the parent's
        os.write(tell, b"1")
        sys.stdin.read()
        os._exit(0)
    os.read(child_is_there, 1)
print("ready", flush=True)
time.sleep(0 if sys.argv[3] == "end" else 60)
"""


def start(folder: Path, rank: int, end: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(rank), end],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_and_one_that_was_killed(channel: Channel, folder: Path):
    other, ended = start(folder, 7, "stay"), start(folder, 8, "end")
    assert ended.wait() == 0
    assert {endpoint.pid for endpoint in endpoints()} == {os.getpid(), other.pid}, "a process left its socket behind"
    (endpoint,) = [each for each in endpoints() if each.pid == other.pid]
    assert ask("any", endpoint) == [{"rank": 7}]
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert len(endpoints()) == 2, "the case is pointless"
    again = Channel(answer)  # a new process tidies up
    assert {endpoint.pid for endpoint in endpoints()} == {os.getpid()}
    again.close()


def test_a_forked_child_does_not_serve(folder: Path):
    parent = start(folder, 7, "fork")
    (endpoint,) = endpoints()
    assert ask("any") == [{"rank": 7}]
    parent.kill()
    parent.wait()
    assert ask("any", endpoint) == [], "the child keeps the socket open"
    assert list(folder.iterdir()) == [], "the stale socket was not removed"
    parent.communicate("")  # ends the child


@pytest.mark.parametrize("accepts", [False, True], ids=["in the queue", "with the question unread"])
def test_a_process_that_ends_before_it_reads_the_question_has_ended(folder: Path, accepts: bool):
    folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with channel_client.opened(folder) as descriptor:
        listener.bind(channel_client.address(descriptor, "77-01234567.sock"))
    listener.listen(1)
    (endpoint,) = endpoints()
    with contextlib.closing(endpoint.ask({"command": "any"}, 5.0)) as reply:
        if accepts:
            listener.accept()[0].close()
        listener.close()
        assert reply.next() is None
    assert jobs([endpoint]) == ([], [])


def test_without_a_folder_there_is_no_channel(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "folders", lambda: [folder / "missing" / "tencache"])
    with pytest.raises(OSError, match="missing"):
        Channel(answer)


def test_a_folder_that_others_may_enter_is_not_used(folder: Path):
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)
    with pytest.raises(PermissionError, match="0700"):
        Channel(answer)
    assert endpoints() == []


def test_a_planted_link_is_not_followed(folder: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=str(folder)):
        Channel(answer)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_jobs_are_processes_with_the_same_run_id(folder: Path):
    def snapshot(rank: int, run_id: str) -> Channel:
        figures = {"pid": 1000 + rank, "rank": rank, "world_size": 2, "run_id": run_id, "engines": [{"steps": 1}]}
        return Channel(lambda request, client: client.send(figures))

    channels = [snapshot(1, "a"), snapshot(0, "a"), snapshot(2, "b")]
    try:
        running, silent = jobs()
    finally:
        for each in channels:
            each.close()
    assert silent == []
    assert {job.run_id: [process.rank for process in job.processes] for job in running} == {"a": [0, 1], "b": [2]}
    assert select(running, None) is None
    assert select(running, "b") is select(running, "1002")
    assert select(running[:1], None) is running[0]
    assert select(running, "1003") is None
