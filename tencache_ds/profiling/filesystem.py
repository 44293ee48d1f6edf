# SPDX-License-Identifier: Apache-2.0
"""The storage behind a folder: its file system, its block device, and the behaviour of a real file there.

Everything is read from ``/proc`` and ``/sys``; nothing here needs torch. Callable from any thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tencache_ds.errors import ConfigError
from tencache_ds.layout import PAGE_NBYTES

SECTOR_NBYTES = 512
"""The unit of ``stat`` and ``size`` in ``/sys/dev/block/*``, independent of the device's own blocks."""

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "beegfs", "ceph", "gpfs"}
)

_SYS = Path("/sys/dev/block")
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""How file systems say that they have no O_DIRECT."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system a path is on."""

    kind: str
    """As in the mount table: ``ext4``, ``xfs``, ``tmpfs``."""

    mount_point: str
    device: str

    @property
    def in_memory(self) -> bool:
        """Files take RAM, and the kernel counts no disk traffic for them."""
        return self.kind in MEMORY_FILE_SYSTEMS

    @property
    def over_network(self) -> bool:
        return self.kind in NETWORK_FILE_SYSTEMS


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """The block device under a folder: a partition or volume, described by the disks it consists of."""

    models: tuple[str, ...]
    """Models of its disks, sorted; a disk without a model is called by its driver or name."""

    serials: tuple[str, ...]
    """Serial numbers of its disks where they have one, sorted."""

    disks_nbytes: int
    """Size of its disks together: what "a drive write" means. 0 if the kernel does not say."""

    logical_block_nbytes: int
    """Offsets and lengths of direct I/O have to be multiples of it."""

    physical_block_nbytes: int
    """The physical write unit of the device: smaller writes are read-modify-write."""

    @property
    def name(self) -> str:
        """Its models, formatted."""
        return ", ".join(self.models)

    def check_alignment(self, path: Path) -> None:
        """Raises ConfigError, which names ``path``, if direct I/O in multiples of 4096 bytes cannot work here."""
        if PAGE_NBYTES % self.logical_block_nbytes:
            raise ConfigError(
                f"nvme_path {path} is on a device with logical blocks of {self.logical_block_nbytes} bytes, and "
                f"TenCache aligns its transfers to {PAGE_NBYTES}: format the drive with blocks of 512 or 4096 bytes "
                "(`nvme format --lbaf`), or name a folder on another one"
            )


def existing_parent(path: Path) -> Path:
    """``path`` itself or its nearest ancestor that exists, with links resolved."""
    path = path.expanduser().resolve()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def file_system_of(path: Path, mount_table: str | None = None) -> FileSystem:
    """The file system that holds ``path``, which need not exist yet.

    Args:
        path: a file or folder.
        mount_table: text in the format of ``/proc/self/mounts``; this process's own when omitted.
    """
    if mount_table is None:
        mount_table = Path("/proc/self/mounts").read_text()
    resolved = existing_parent(path)
    best = FileSystem(kind="unknown", mount_point="/", device="unknown")
    for line in mount_table.splitlines():
        device, mount_point, kind = (_unescaped(word) for word in line.split()[:3])
        # A later mount on the same point hides the earlier one, hence >=.
        if resolved.is_relative_to(mount_point) and len(mount_point) >= len(best.mount_point):
            best = FileSystem(kind, mount_point, device)
    return best


def _unescaped(word: str) -> str:
    """A word of the mount table, in which spaces and the like are written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def device_number(path: Path) -> tuple[int, int] | None:
    """Major and minor number of the block device under a folder; None on tmpfs, overlay and network file systems."""
    number = os.stat(path).st_dev
    if os.major(number) == 0:  # without a device, or with several (btrfs): the mount table knows
        source = file_system_of(path).device
        try:
            number = os.stat(source).st_rdev if source.startswith("/dev/") else 0
        except OSError:
            return None
    return (os.major(number), os.minor(number)) if os.major(number) else None


def block_device_of(path: Path, sys_block: Path = _SYS) -> BlockDevice | None:
    """The block device under an existing folder; None on tmpfs, overlay and network file systems.

    Args:
        path: the folder.
        sys_block: where devices are listed by number.
    """
    number = device_number(path)
    if number is None:
        return None
    block = sys_block / f"{number[0]}:{number[1]}"
    return read_block_device(block.resolve()) if block.exists() else None


def read_block_device(block: Path) -> BlockDevice:
    """The properties of a block device from ``/sys``; it may be a partition, a RAID or a volume."""
    disks = _disks_below(block)
    whole = _whole_disk(block)
    return BlockDevice(
        models=tuple(sorted({_model(disk) for disk in disks})),
        serials=tuple(sorted({serial for disk in disks if (serial := _serial(disk))})),
        disks_nbytes=sum(_number(disk / "size", 0) for disk in disks) * SECTOR_NBYTES,
        logical_block_nbytes=_number(whole / "queue" / "logical_block_size", SECTOR_NBYTES),
        physical_block_nbytes=_number(whole / "queue" / "physical_block_size", SECTOR_NBYTES),
    )


def _whole_disk(block: Path) -> Path:
    return block.parent if (block / "partition").exists() else block


def _disks_below(block: Path) -> set[Path]:
    """The disks that a block device consists of."""
    block = _whole_disk(block)
    below = list((block / "slaves").glob("*"))  # LVM, RAID, encryption
    return set().union(*(_disks_below(part.resolve()) for part in below)) if below else {block}


def _model(disk: Path) -> str:
    model = _text(disk / "device" / "model")
    if model:
        return model
    driver = disk / "device" / "driver"
    return driver.resolve().name if driver.exists() else disk.name


def _serial(disk: Path) -> str:
    return _text(disk / "device" / "serial") or _text(disk / "serial")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path, otherwise: int) -> int:
    text = _text(file)
    return int(text) if text.isdigit() and int(text) else otherwise


def supports_direct_io(folder: Path) -> bool:
    """Whether a page written with O_DIRECT in ``folder`` reads back with O_DIRECT. Leaves no file behind.

    Raises:
        OSError: the folder cannot be written to at all.
    """
    created, name = tempfile.mkstemp(prefix=".tencache-doctor-", dir=folder)
    os.close(created)
    try:
        descriptor = open_direct(name, os.O_RDWR)
    finally:
        os.unlink(name)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def open_direct(path: str | Path, flags: int) -> int | None:
    """A file descriptor with O_DIRECT, tried with the file's first page; None where the file system refuses it.

    Args:
        path: a file of the caller's own, whose first page is overwritten.
        flags: of ``os.open``, for reading and writing.

    Raises:
        OSError: the file cannot be opened or written to for another reason.
    """
    pattern = bytes(range(256)) * (PAGE_NBYTES // 256)
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return None
    try:  # some file systems take the flag and refuse the transfer
        with mmap.mmap(-1, PAGE_NBYTES) as page:  # anonymous maps are page-aligned, which O_DIRECT asks for
            page[:] = pattern
            works = os.pwritev(descriptor, [page], 0) == PAGE_NBYTES
            page[:] = bytes(PAGE_NBYTES)
            works = works and os.preadv(descriptor, [page], 0) == PAGE_NBYTES and page[:] == pattern
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _REFUSALS:
            raise
        return None
    if works:
        return descriptor
    os.close(descriptor)
    return None


def parse_written(text: str) -> int:
    """Bytes written, of the text of a block device's ``stat`` file."""
    return int(text.split()[6]) * SECTOR_NBYTES


class DiskWrites:
    """Bytes that the block devices under some folders have written since the meter was created, i.e. drive wear. Writes
    of other processes count too: measure on an otherwise idle machine.
    """

    def __init__(self, paths: Iterable[str], sys_block: Path = _SYS) -> None:
        numbers = {device_number(Path(path)) for path in paths}
        self._files = [sys_block / f"{number[0]}:{number[1]}" / "stat" for number in numbers if number is not None]
        # With one of several folders on no device the sum would say too little.
        self._start = None if None in numbers or not numbers else self._read()

    def nbytes(self) -> int | None:
        """Since the meter was created; None where a folder lies on no block device."""
        now = None if self._start is None else self._read()
        return None if now is None or self._start is None else now - self._start

    def _read(self) -> int | None:
        try:
            return sum(parse_written(file.read_text()) for file in self._files)
        except (OSError, ValueError, IndexError):
            return None
