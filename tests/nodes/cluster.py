# SPDX-License-Identifier: Apache-2.0
"""Nodes on one machine: each has its own network, host name, processes, shared memory, local drive and boot id.

A node is a set of Linux namespaces around an SSH server, so that DeepSpeed's launcher starts ranks in it as on any
host. Nothing outside the namespaces is changed, and they end with the process that made the cluster: a crash leaves
nothing behind. All nodes see the machine's files; only ``LOCAL_DRIVE`` is each one's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

LOCAL_DRIVE = "/mnt"
"""Where each node has an ext4 file system of its own."""

SSHD = "/usr/sbin/sshd"  # which insists on an absolute path

NEEDED = {
    "ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "nsenter": "util-linux", "pgrep": "procps",
    "mkfs.ext4": "e2fsprogs", "ssh": "openssh-client", "ssh-keygen": "openssh-client", SSHD: "openssh-server",
    "pdsh": "pdsh",
}  # fmt: skip
"""Programs, and the Debian packages they are in."""

PATIENCE_S = 30.0
WITH_THIS_PROCESS = ("setpriv", "--pdeathsig", "KILL")
"""Has a command end where the process that started it ends."""

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

# As process 1 of a node. Each mount hides something from this node alone.
SET_UP = """
set -e
hostname "$HOST"
mount --make-rprivate /
mount --bind "$FOLDER/hosts" /etc/hosts
mount --bind "$FOLDER/ssh_config" /etc/ssh/ssh_config
mount --bind "$FOLDER/boot_id" /proc/sys/kernel/random/boot_id
if [ -e "$FOLDER/meminfo" ]; then mount --bind "$FOLDER/meminfo" /proc/meminfo; fi
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount -o loop "$FOLDER/drive.img" "$DRIVE"
ip link set lo up
exec "$SSHD" -D -e -f "$FOLDER/sshd_config"
"""


def what_is_missing() -> str:
    """Why nodes cannot be made here, and what to do; empty if they can."""
    if os.geteuid() != 0:
        return "namespaces, loop devices and SSH servers need root (and a container with all privileges)"
    packages = {package for program, package in NEEDED.items() if shutil.which(program) is None}
    if packages:
        return f"programs are missing: apt-get install {' '.join(sorted(packages))}"
    probe = subprocess.run(["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    if probe.returncode:
        return f"namespaces cannot be made here: {probe.stderr.strip()}"
    return ""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node.

    Attributes:
        address_name: its name in the host file, which every node resolves.
        host_name: what it calls itself.
        machine: nodes with the same number have the same boot id, as containers on one machine do.
        available_nbytes: the memory that it says is available; None for what the machine says.
        drive_nbytes: size of its own drive.
    """

    address_name: str
    host_name: str
    machine: int
    available_nbytes: int | None = None
    drive_nbytes: int = 1 << 30


class Node:
    """A running node.

    Args:
        spec: what it is like.
        address: its IP address.
        folder: its files on the machine.
        process: outside the namespaces; they end with it.

    Attributes:
        first: process id of its first process, outside.
    """

    def __init__(self, spec: NodeSpec, address: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self.address = address
        self.folder = folder
        self._process = process
        self.first = _child_of(process.pid)

    def command(self, words: Sequence[str], folder: Path = Path("/")) -> list[str]:
        """``words`` as a command to run in the node, in a folder."""
        return ["nsenter", "--target", str(self.first), *NAMESPACES, f"--wd={folder}", "--", *words]

    def run(self, *words: str, timeout_s: float = 60) -> str:
        """Output of a command in the node.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        done = subprocess.run(
            self.command(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout)
        return done.stdout

    def kill(self) -> None:
        """Ends all of its processes at once, which no handler can delay."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def runs(self, program: str) -> bool:
        """Whether a process whose command line contains ``program`` runs in the node."""
        words = ["pgrep", "--full", program]
        return subprocess.run(self.command(words), stdout=subprocess.DEVNULL).returncode == 0


class Cluster:
    """Nodes connected by a switch. A context manager.

    Args:
        specs: the nodes; jobs are launched from the first one.
        folder: for their files, on a file system that can hold their drives.
    """

    def __init__(self, specs: Sequence[NodeSpec], folder: Path) -> None:
        self._specs = specs
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._switch = 0
        self.nodes: list[Node] = []

    def __enter__(self) -> Cluster:
        self._folder.mkdir(parents=True, exist_ok=True)
        key = self._folder / "key"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
            shutil.copy(self._folder / "key.pub", self._folder / "authorized_keys")
        bridge = "ip link add bridge type bridge && ip link set bridge up && exec sleep infinity"
        switch = self._start(["unshare", "--net", "--fork", "--kill-child", "sh", "-c", bridge], self._folder / "log")
        try:
            self._switch = _child_of(switch.pid)
            _until(lambda: "bridge:" in self._links(), "the switch")
            for number in range(len(self._specs)):
                self.nodes.append(self._start_node(number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all nodes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def restart(self, number: int) -> None:
        """Has a node that was killed start again, with the drive it had."""
        _until(lambda: f"port{number}:" not in self._links(), f"node {number} to leave the switch")
        self.nodes[number] = self._start_node(number)

    def unplug(self, number: int) -> None:
        """Cuts a node off: from now on no packet reaches it or comes from it."""
        self._in_switch("ip", "link", "set", f"port{number}", "down")

    def hostfile(self, slots: int) -> Path:
        """A host file of all nodes."""
        path = self._folder / "hostfile"
        path.write_text("".join(f"{spec.address_name} slots={slots}\n" for spec in self._specs))
        return path

    def _start_node(self, number: int) -> Node:
        spec, folder = self._specs[number], self._folder / f"node{number}"
        folder.mkdir(exist_ok=True)
        self._write_files(spec, number, folder)
        variables = {"HOST": spec.host_name, "FOLDER": str(folder), "DRIVE": LOCAL_DRIVE, "SSHD": SSHD}
        log = folder / "log"
        process = self._start(
            ["unshare", *NAMESPACES, "--mount-proc", "--fork", "--kill-child=SIGKILL", "sh", "-c", SET_UP],
            log,
            os.environ | variables,
        )
        node = Node(spec, self._address(number), folder, process)
        _until(lambda: "Server listening" in log.read_text(), f"node {number}: see {log}")
        # The same hardware address after a restart: other nodes remember it.
        eth0 = ["name", "eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", str(node.first)]
        self._in_switch("ip", "link", "add", f"port{number}", "type", "veth", "peer", *eth0)
        self._in_switch("ip", "link", "set", f"port{number}", "master", "bridge", "up")
        node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")
        return node

    def _in_switch(self, *words: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._switch), "--net", *words], check=True)

    def _links(self) -> str:
        return Path(f"/proc/{self._switch}/net/dev").read_text()

    def _write_files(self, spec: NodeSpec, number: int, folder: Path) -> None:
        names = [f"{self._address(n)} {other.address_name}" for n, other in enumerate(self._specs)]
        own = "" if spec.host_name == "localhost" else f"{self._address(number)} {spec.host_name}\n"
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + own + "\n".join(names) + "\n")
        key = self._folder / "key"
        (folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {key}\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n  BatchMode yes\n"
        )
        host_key = folder / "host_key"
        if not host_key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True)
        (folder / "sshd_config").write_text(
            f"HostKey {host_key}\nAuthorizedKeysFile {self._folder / 'authorized_keys'}\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nUsePAM no\nPidFile none\n"
        )
        (folder / "boot_id").write_text(f"00000000-0000-4000-8000-{spec.machine:012d}\n")
        if spec.available_nbytes is not None:
            kib = spec.available_nbytes // 1024
            (folder / "meminfo").write_text(f"MemTotal: {2 * kib} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n")
        drive = folder / "drive.img"
        if not drive.exists():
            with open(drive, "wb") as image:
                image.truncate(spec.drive_nbytes)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(drive)], check=True)

    def _address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def _start(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*WITH_THIS_PROCESS, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process


def _child_of(pid: int) -> int:
    """The process that ``unshare --fork`` has made."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    _until(lambda: children.read_text() != "", f"process {pid} to fork")
    return int(children.read_text())


def _until(happened: Callable[[], bool], what: str) -> None:
    t_end = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > t_end:
            raise RuntimeError(f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(0.05)
