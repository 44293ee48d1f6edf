# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's async_io and pin_memory ops, and the loading of ops, with errors that say what to install.

The builder of the current accelerator is the one DeepSpeed itself would use
(``get_accelerator().create_op_builder(name)``): prebuilt where DeepSpeed was installed with ``DS_BUILD_AIO=1``, else
compiled on first use into torch's extension cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import threading
from types import ModuleType
from typing import Any

from tencache_ds.errors import ConfigError
from tencache_ds.ops.build_lock import told_what_takes_so_long

_ON_LIBAIO = ("async_io", "tencache_aio")
_ON_CUDA = ("async_io", "tencache_lend")
_lock = threading.Lock()


def load_async_io() -> ModuleType:
    """The async_io op (``aio_handle`` and others), with the pin_memory op it depends on. Any thread.

    Raises:
        ConfigError: names the missing part and the package to install.
    """
    return _load("AsyncIOBuilder", "async_io")


def load_pin_memory() -> ModuleType:
    """The pin_memory op (``pin_handle``): page-locked host memory without CUDA. Any thread. A DeepSpeed without it has
    the same methods in its aio handles.

    Raises:
        ConfigError: names the missing part and the package to install.
    """
    if _builder("PinMemoryBuilder") is None:
        handles = ModuleType("pin_memory")
        handles.__dict__["pin_handle"] = load_async_io().aio_handle
        return handles
    return _load("PinMemoryBuilder", "pin_memory")


def _load(builder_name: str, op_name: str) -> ModuleType:
    builder = _builder(builder_name)
    if builder is None:
        from deepspeed.accelerator import get_accelerator

        raise ConfigError(
            f"DeepSpeed has no {op_name} op for the accelerator {get_accelerator().device_name()!r}: "
            'set "io_backend": "posix"'
        )
    return load_op(builder, op_name)


def _builder(name: str) -> Any:
    """DeepSpeed's builder of an op for the current accelerator; None if it has none.

    Raises:
        ConfigError: there is no DeepSpeed.
    """
    try:
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise ConfigError(
            f"DeepSpeed's ops are not available: deepspeed cannot be imported ({error}); install it with "
            "`pip install deepspeed`"
        ) from error
    builder = get_accelerator().create_op_builder(name)
    return None if type(builder).__name__ == "NotImplementedBuilder" else builder


def load_op(builder: Any, op_name: str, *, without: str = 'set "io_backend": "posix"') -> ModuleType:
    """Builds an op if needed and imports it. Any thread.

    Args:
        builder: an instance of a DeepSpeed ``OpBuilder``.
        op_name: its name, for messages.
        without: the consequence of its absence, for messages.

    Raises:
        ConfigError: names the missing part and the package to install.
    """
    with _lock, told_what_takes_so_long(op_name):  # torch's build lock is per file, not per thread
        try:
            return builder.load(verbose=False)
        except Exception as error:  # compilers, linkers and loaders fail in too many ways to list
            causes = _missing(builder, op_name)
            if not causes:
                causes = [f"{type(error).__name__}: {_last_lines(str(error))}"]
            raise ConfigError(
                f"the {op_name} op cannot be built or loaded: {'; '.join(causes)}. "
                f"Without it, {without}; `ds_report` shows DeepSpeed's findings"
            ) from error


def _missing(builder: Any, op_name: str) -> list[str]:
    """Build requirements that this machine lacks, each with its remedy."""
    from deepspeed.accelerator import get_accelerator

    causes = []
    if not _runs(["ninja", "--version"]):
        if importlib.util.find_spec("ninja") is not None:
            causes.append("ninja is installed for this Python but not on PATH (activate the virtual environment)")
        else:
            causes.append("ninja is missing (`pip install ninja`, or `apt install ninja-build`)")
    compiler = os.environ.get("CXX", "c++")
    has_compiler = shutil.which(compiler.split()[0]) is not None
    if not has_compiler:
        causes.append(f"the C++ compiler {compiler!r} is missing (`apt install build-essential`)")
    if op_name in _ON_LIBAIO and has_compiler and not _links_libaio(builder):
        causes.append("libaio or its headers are missing (`apt install libaio-dev`)")
    if op_name in _ON_CUDA and get_accelerator().device_name() == "cuda":
        from torch.utils import cpp_extension

        if cpp_extension.CUDA_HOME is None and cpp_extension.ROCM_HOME is None:
            causes.append("the CUDA toolkit was not found (set CUDA_HOME, or `apt install nvidia-cuda-toolkit`)")
    return causes


def _links_libaio(builder: Any) -> bool:
    try:
        return bool(builder.has_function("io_submit", ("aio",)))
    except Exception:  # the probe itself needs a compiler and a writable temporary folder
        return False


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _last_lines(text: str, n_lines: int = 5) -> str:
    return "\n".join(text.strip().splitlines()[-n_lines:])
