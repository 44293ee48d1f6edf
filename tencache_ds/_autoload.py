# SPDX-License-Identifier: Apache-2.0
"""The post-import hook that activates TenCache without editing the training script.

torch (>= 2.5) calls :func:`autoload` through the ``torch.backends`` entry point on ``import torch``, so every process
the ``deepspeed`` launcher starts gets it. The hook only waits for ``deepspeed.runtime.config`` to be imported; it
imports nothing heavy and never raises: a broken TenCache must not break a program that does not use it. It is installed
with ``TENCACHE_DISABLE`` too, to warn about a config that selects TenCache.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

WATCHED_MODULE = "deepspeed.runtime.config"


class _HookingLoader(importlib.abc.Loader):
    """Runs the real loader, then the hook."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _hook_config(module)

    def __getattr__(self, name: str) -> object:  # get_source, get_code, ...: what inspect and linecache ask for
        return getattr(self._loader, name)


class _PostImportFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != WATCHED_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


def _hook_config(module: ModuleType) -> None:
    try:
        from tencache_ds.integration.config_hook import hook_config_module

        hook_config_module(module)
    except Exception as error:  # only a broken installation gets here; stock DeepSpeed must continue
        warnings.warn(
            f"TenCache could not be hooked into DeepSpeed and stays inactive, even if a config selects it: {error!r}",
            stacklevel=2,
        )


def install() -> None:
    """Waits for DeepSpeed's config module, or hooks it now if it is already imported. Idempotent, never raises."""
    module = sys.modules.get(WATCHED_MODULE)
    if module is not None and hasattr(module, "DeepSpeedConfig"):
        _hook_config(module)
    elif not any(isinstance(finder, _PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImportFinder())


def autoload() -> None:
    """The ``torch.backends`` entry point: see the module's docstring."""
    install()
