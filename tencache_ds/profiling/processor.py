# SPDX-License-Identifier: Apache-2.0
"""What Linux says of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_field(*names: str, cpuinfo: str | None = None) -> str | None:
    """The first of some fields that has a value; None where none has, or there is no such file.

    Args:
        names: as in ``/proc/cpuinfo``; they differ between architectures.
        cpuinfo: its text; this machine's when omitted.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
        except OSError:
            return None
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names and value.strip():
            return value.strip()
    return None


def processor_name(cpuinfo: str | None = None) -> str:
    """Model of the processor, of the text of ``/proc/cpuinfo`` (this machine's when omitted); else its architecture."""
    return processor_field("model name", "Model", "cpu model", cpuinfo=cpuinfo) or platform.machine()
