# SPDX-License-Identifier: Apache-2.0
"""Folders for scratch files that a config names: refused if impossible or implausible."""

from __future__ import annotations

import os
import re

from tencache_ds.errors import ConfigError
from tencache_ds.names import ZERO_KEY

LONGEST_PATH_NBYTES = 4096
OUR_NAMES_NBYTES = 256
"""Reserve for the names of folders and files created below the user's folder."""

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_NO_PATHS = ("none", "null", "auto")
"""Values that other programs write for "no path" (accelerate's questionnaire, for one)."""


def check_nvme_path(key: str, path: object) -> None:
    """Checks that scratch files can be created under ``path``; creates the folder as DeepSpeed would.

    Args:
        key: where in the config it stands.
        path: as it was written.

    Raises:
        ConfigError: names the key, the path and the remedy.
    """
    if path is None or (isinstance(path, str) and path.lower() in _NO_PATHS):
        raise ConfigError(
            f'"{key}" is missing: with "device": "nvme" it must name a folder on the NVMe drive.{_hint(key, path)}'
        )
    folder = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(folder, str):
        raise ConfigError(f'"{key}" cannot be {path!r}: it must name a folder on the NVMe drive.')
    _check_text(key, folder)
    try:
        _make_folder(folder)
    except OSError as error:
        raise ConfigError(
            f'"{key}" is {folder!r}, which cannot be created: {error.strerror}. Name a folder you may write to.'
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f'"{key}" is {folder!r}, which is not writable for this user. Name a folder you may write to.'
        )


def _hint(key: str, path: object) -> str:
    """Where the path may have been lost."""
    if isinstance(path, str) and path.lower() == "auto":
        return ' "auto" is not filled in here.'
    section = key.removeprefix(f"{ZERO_KEY}.").removesuffix(".nvme_path")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true" or "." in section:
        return ""
    return (
        f" accelerate's launcher does not pass --{section}_nvme_path on, nor {section}_nvme_path from the file of "
        f'"accelerate config": set ACCELERATE_DEEPSPEED_{section.upper()}_NVME_PATH in the environment, or name a '
        "DeepSpeed config file (deepspeed_config_file)."
    )


def _check_text(key: str, folder: str) -> None:
    """Checks that need no file system: impossible names, and implausible ones."""
    if not folder.strip():
        raise ConfigError(f'"{key}" is {folder!r}, an empty name: it must name a folder on the NVMe drive.')
    if folder != folder.strip():
        raise ConfigError(f'"{key}" is {folder!r}, which begins or ends with white space. Remove it.')
    if folder.startswith("~") or _VARIABLE.search(folder):
        expanded = os.path.expandvars(os.path.expanduser(folder))
        example = f", for example {expanded!r}" if expanded != folder else ""
        raise ConfigError(
            f'"{key}" is {folder!r}, but neither "~" nor variables are expanded in a DeepSpeed config: a folder '
            f"of exactly that name would be created. Write the full path{example}."
        )
    if "\0" in folder:
        raise ConfigError(f'"{key}" is {folder!r}, which contains a null character. Paths cannot.')
    try:
        nbytes = len(os.fsencode(os.path.abspath(folder)))
    except UnicodeEncodeError as error:
        raise ConfigError(
            f'"{key}" is {folder!r}, which cannot be encoded for the file system ({error.reason}). Name another folder.'
        ) from None
    if nbytes > LONGEST_PATH_NBYTES - OUR_NAMES_NBYTES:
        raise ConfigError(
            f'"{key}" is a path of {nbytes} bytes ({folder[:40]!r}…): with the names of scratch files below it, it is '
            f"longer than the {LONGEST_PATH_NBYTES} bytes that the system allows. Name a folder with a shorter path."
        )


def _make_folder(path: str) -> None:
    """``os.makedirs`` without its recursion, which a path of a thousand components does not survive."""
    missing = []
    while path and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # another rank was faster
            continue
    os.makedirs(missing[0] if missing else path, exist_ok=True)  # raises where a file has that name
