# SPDX-License-Identifier: Apache-2.0
"""Ready ``ds_config.json`` files, one per way of using the memory of a machine.

>>> from tencache_ds import configs
>>> configs.names()
['cpu_offload', 'ram_and_nvme', 'zero_infinity_nvme']

Copy one, set ``nvme_path`` to a folder on a local disk and the batch size and learning rate to yours.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["names", "path"]

_FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """Names of the files that come with the package, sorted, without ``.json``."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def path(name: str) -> Path:
    """Where the file called ``name`` is on this machine. May be called from any thread.

    Args:
        name: one of :func:`names`, with or without ``.json``.

    Raises:
        ValueError: there is no such file; the message lists those there are.
    """
    stem = name.removesuffix(".json")
    if stem not in names():
        raise ValueError(f"there is no config named {name!r}; there are: {', '.join(names())}")
    return _FOLDER / f"{stem}.json"
