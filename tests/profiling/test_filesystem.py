# SPDX-License-Identifier: Apache-2.0
"""Mount table, block devices and direct I/O: the kernel's texts as given values, and one real file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tencache_ds.errors import ConfigError
from tencache_ds.profiling import filesystem
from tencache_ds.profiling.filesystem import (
    BlockDevice,
    DiskWrites,
    block_device_of,
    device_number,
    existing_parent,
    file_system_of,
    parse_written,
    read_block_device,
    supports_direct_io,
)

MOUNTS = """\
/dev/vda1 / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/home /mnt/my\\040share nfs4 rw 0 0
/dev/nvme0n1 /mnt xfs rw 0 0
/dev/old /data ext4 rw 0 0
/dev/mapper/fast\\134disk /data btrfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "device"),
    [
        ("/", "ext4", "/dev/vda1"),
        ("/dev/shm", "tmpfs", "tmpfs"),
        ("/dev/shmother", "ext4", "/dev/vda1"),
        ("/mnt", "xfs", "/dev/nvme0n1"),
        ("/mnt/my share", "nfs4", "server:/home"),
        ("/data/a", "btrfs", "/dev/mapper/fast\\disk"),
    ],
)
def test_longest_and_latest_mount_wins(monkeypatch: pytest.MonkeyPatch, path: str, kind: str, device: str) -> None:
    monkeypatch.setattr(filesystem, "existing_parent", lambda path: path)
    file_system = file_system_of(Path(path), MOUNTS)
    assert (file_system.kind, file_system.device) == (kind, device)
    assert file_system.in_memory is (kind == "tmpfs")
    assert file_system.over_network is (kind == "nfs4")


def test_existing_parent(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path.resolve()


def test_direct_io_leaves_nothing(tmp_path: Path) -> None:
    supports_direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_direct_io_on_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="No space"):
        supports_direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []


def disk(root: Path, name: str, model: str | None = None, serial: str | None = None, sectors: int = 0) -> Path:
    folder = root / name
    (folder / "device").mkdir(parents=True)
    (folder / "size").write_text(f"{sectors}\n")
    if model is not None:
        (folder / "device" / "model").write_text(f"{model}   \n")
    if serial is not None:
        (folder / "device" / "serial").write_text(f"  {serial}\n")
    return folder


def test_the_disks_below_a_device(tmp_path: Path) -> None:
    drive = disk(tmp_path, "nvme0n1", "Fast 1", "S1", sectors=2_000_000)
    other = disk(tmp_path, "nvme1n1", "Fast 2", "S2", sectors=1_000_000)
    (drive / "queue").mkdir()
    (drive / "queue" / "logical_block_size").write_text("4096\n")
    (drive / "queue" / "physical_block_size").write_text("16384\n")
    partition = drive / "nvme0n1p1"
    partition.mkdir()
    (partition / "partition").write_text("1")
    raid = tmp_path / "md0"
    (raid / "slaves").mkdir(parents=True)
    for below in (partition, other):
        (raid / "slaves" / below.name).symlink_to(below)
    assert read_block_device(partition) == BlockDevice(("Fast 1",), ("S1",), 1_024_000_000, 4096, 16384)
    assert read_block_device(raid) == BlockDevice(("Fast 1", "Fast 2"), ("S1", "S2"), 1_536_000_000, 512, 512)


def test_a_disk_without_a_model(tmp_path: Path) -> None:
    virtual = disk(tmp_path, "vda")
    (virtual / "serial").write_text("virtual-1\n")
    (tmp_path / "virtio_blk").mkdir()
    (virtual / "device" / "driver").symlink_to(tmp_path / "virtio_blk")
    (tmp_path / "loop0").mkdir()
    assert read_block_device(virtual).name == "virtio_blk"
    assert read_block_device(virtual).serials == ("virtual-1",)
    assert read_block_device(tmp_path / "loop0") == BlockDevice(("loop0",), (), 0, 512, 512)


@pytest.mark.parametrize("logical", [512, 4096])
def test_blocks_that_suit_the_alignment(logical: int) -> None:
    BlockDevice(("x",), (), 0, logical, 16384).check_alignment(Path("/fast"))


def test_blocks_that_are_too_large_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"/fast.*16384 bytes.*nvme format"):
        BlockDevice(("x",), (), 0, 16384, 16384).check_alignment(Path("/fast"))


def test_the_device_of_a_file_system_without_one_comes_from_the_mount_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_stat = os.stat
    result = {"/pool": (0, 40, 0), "/dev/nvme0n1p2": (0, 6, os.makedev(259, 2))}

    def stat(path, *rest, **named):
        if str(path) not in result:
            return real_stat(path, *rest, **named)
        major, minor, rdev = result[str(path)]
        return type("Status", (), {"st_dev": os.makedev(major, minor), "st_rdev": rdev})

    for source, number in (("/dev/nvme0n1p2", (259, 2)), ("overlay", None), ("/dev/gone", None)):
        monkeypatch.setattr(
            filesystem, "file_system_of", lambda path, source=source: filesystem.FileSystem("btrfs", "/pool", source)
        )
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", stat)
            assert device_number(Path("/pool")) == number
    monkeypatch.setattr(filesystem, "device_number", lambda path: (259, 2))
    assert block_device_of(tmp_path, tmp_path) is None  # /sys hidden by a sandbox
    disk(tmp_path, "259:2", "Fast 1")
    device = block_device_of(tmp_path, tmp_path)
    assert device is not None
    assert device.name == "Fast 1"


def test_blocks_written() -> None:
    text = "  153  51  21120  104   44   1   3552   176    0   180   281    0   0   0   0   9   0\n"
    assert parse_written(text) == 3552 * 512


def test_without_a_device_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "254:0" / "stat"
    stat.parent.mkdir()
    stat.write_text("1 1 1 1 1 1 100 1 1 1 1\n")
    monkeypatch.setattr(filesystem, "device_number", lambda path: None if path.name == "ram" else (254, 0))
    writes = DiskWrites(["/disk", "/disk/too"], tmp_path)
    stat.write_text("1 1 1 1 1 1 108 1 1 1 1\n")
    assert writes.nbytes() == 8 * 512
    assert DiskWrites(["/disk", "/ram"], tmp_path).nbytes() is None
    assert DiskWrites([], tmp_path).nbytes() is None


def test_import_is_light() -> None:
    code = "import sys, tencache_ds.profiling.filesystem; print({'torch', 'pydantic', 'psutil'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"
