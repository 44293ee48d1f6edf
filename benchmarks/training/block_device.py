# SPDX-License-Identifier: Apache-2.0
"""What the block devices under some folders have written, as the kernel counts it: what a drive's life is made of.

Everything on the device counts, of other processes too: measure on a machine that does nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

SECTOR_NBYTES = 512
"""The unit of ``/sys/dev/block/*/stat``, whatever the device's own sectors are."""

SYS = Path("/sys/dev/block")


def parse_written(text: str) -> int:
    """Bytes written, of the text of a block device's ``stat`` file."""
    return int(text.split()[6]) * SECTOR_NBYTES


def parse_mount_source(mountinfo: str, path: str) -> str:
    """What is mounted where ``path`` lies ("/dev/nvme0n1p1", "tmpfs"), of ``/proc/self/mountinfo``; "" if unknown."""
    best, source = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")  # spaces are written as \\040
        if (path.rstrip("/") + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, source = mount, right.split()[1]
    return source


def device_of(path: Path) -> tuple[int, int] | None:
    """Major and minor number of the block device under a folder; None on tmpfs, overlay and network file systems."""
    number = os.stat(path).st_dev
    if os.major(number) == 0:  # without a device, or with several (btrfs): the mount table knows
        source = parse_mount_source(Path("/proc/self/mountinfo").read_text(), str(path.resolve()))
        try:
            number = os.stat(source).st_rdev if source.startswith("/dev/") else 0
        except OSError:
            return None
    return (os.major(number), os.minor(number)) if os.major(number) else None


class DiskWrites:
    """Bytes that the block devices under some folders have written since the meter was made."""

    def __init__(self, paths: Iterable[str]) -> None:
        devices = {device_of(Path(path)) for path in paths}
        self._files = [SYS / f"{device[0]}:{device[1]}" / "stat" for device in devices if device is not None]
        # With one of several folders on no device the sum would say too little.
        self._start = None if None in devices or not devices else self._read()

    def nbytes(self) -> int | None:
        """Since the meter was made; None where a folder lies on no block device."""
        now = None if self._start is None else self._read()
        return None if now is None or self._start is None else now - self._start

    def _read(self) -> int | None:
        try:
            return sum(parse_written(file.read_text()) for file in self._files)
        except (OSError, ValueError, IndexError):
            return None
