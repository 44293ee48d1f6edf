# SPDX-License-Identifier: Apache-2.0
"""What kind of storage a folder is on: read from the mount table and tried with one real file."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

PAGE_NBYTES = 4096
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "beegfs", "ceph", "gpfs"}
)


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
        device, mount_point, kind = line.split()[:3]
        mount_point = mount_point.replace("\\040", " ")
        # A later mount on the same point hides the earlier one, hence >=.
        if resolved.is_relative_to(mount_point) and len(mount_point) >= len(best.mount_point):
            best = FileSystem(kind, mount_point, device)
    return best


def supports_direct_io(folder: Path) -> bool:
    """Whether a page written with O_DIRECT in ``folder`` reads back with O_DIRECT. Leaves no file behind.

    Raises:
        OSError: the folder cannot be written to at all.
    """
    descriptor, name = tempfile.mkstemp(prefix=".tencache-doctor-", dir=folder)
    os.close(descriptor)
    pattern = bytes(range(256)) * (PAGE_NBYTES // 256)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:
        os.unlink(name)
        return False
    try:
        with mmap.mmap(-1, PAGE_NBYTES) as page:  # anonymous maps are page-aligned, which O_DIRECT asks for
            page[:] = pattern
            if os.pwritev(descriptor, [page], 0) != PAGE_NBYTES:
                return False
            page[:] = bytes(PAGE_NBYTES)
            return os.preadv(descriptor, [page], 0) == PAGE_NBYTES and page[:] == pattern
    except OSError:
        return False
    finally:
        os.close(descriptor)
        os.unlink(name)
