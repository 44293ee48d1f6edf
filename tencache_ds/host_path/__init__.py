# SPDX-License-Identifier: Apache-2.0
"""What makes DeepSpeed's own host path faster, and moves no byte itself: the Python around each module and parameter.

Training without it is the same, bit for bit, and slower: ``"host_path": false`` leaves every function here to
DeepSpeed. :class:`HostPath` has the decision for one engine; the rest of TenCache asks this module only. Each module
states what it was measured to gain. All together, on a busy CPU, one rank, 24 layers of hidden size 64, everything in
RAM, engines in turns: forward and backward take 434 ms of the thread that computes, 728 ms with ``"host_path": false``
and 684 ms with stock; of :mod:`.launches` only its share of a profile is known.

[Note: the whole process] Some functions are replaced for the process, not for an engine: those of the accelerator that
ask for streams, once an engine with the host path was built, and ``torch.nn.functional.linear``, as long as there is
such an engine without an optimizer. DeepSpeed's autograd functions keep their signatures, and its Muon is imported
once. To engines without the host path they give the same results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tencache_ds.config import TenCacheConfig
from tencache_ds.host_path.fetches import QuickCoordinator, partition
from tencache_ds.host_path.gathers import finish_after_forward, gather_at_once
from tencache_ds.host_path.gradients import GradientBucketsMixin, GradientNorms
from tencache_ds.host_path.launches import LaunchGraphs, ask_for_streams_quickly, skip_autograd_without_gradients
from tencache_ds.host_path.module_hooks import lighten_hooks
from tencache_ds.host_path.parts import HostPath
from tencache_ds.host_path.startup import compile_when_called, vendor_at_once
from tencache_ds.host_path.suspended_hooks import SuspendedHooks, before_release, before_user_gathers, user_releases
from tencache_ds.integration.seams import Feature, works

__all__ = [
    "GradientBucketsMixin",
    "GradientNorms",
    "HostPath",
    "LaunchGraphs",
    "QuickCoordinator",
    "SuspendedHooks",
    "before_release",
    "before_user_gathers",
    "building_optimizer",
    "finish_after_forward",
    "gather_at_once",
    "install",
    "partition",
    "prepare",
    "user_releases",
]


def prepare(options: TenCacheConfig) -> None:
    """Called when a config was parsed, before DeepSpeed looks at the optimizer."""
    if options.host_path and works(Feature.MUON):
        compile_when_called()


def building_optimizer(options: TenCacheConfig) -> AbstractContextManager[None]:
    """Within the block DeepSpeed constructs the optimizer of an engine."""
    return vendor_at_once() if options.host_path else contextlib.nullcontext()


def install(parts: HostPath, offload: Any, *, trains: bool = True) -> Callable[[], None]:
    """Replaces what DeepSpeed has put on an engine's model.

    Args:
        parts: those of the engine.
        offload: its ``DeepSpeedZeRoOffload``, with hooks and a :class:`QuickCoordinator`.
        trains: whether there are backward passes.

    Returns:
        Ends what is not the engine's alone. Idempotent.
    """
    if parts.streams:
        ask_for_streams_quickly()
    if parts.hooks:
        lighten_hooks(offload)
    return skip_autograd_without_gradients() if parts.linear and not trains else _nothing


def _nothing() -> None:
    pass
