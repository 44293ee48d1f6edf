# SPDX-License-Identifier: Apache-2.0
"""Gathers on one rank, in the order of the device's streams.

On one rank a gather is a copy of the shard to the device. DeepSpeed has the host wait until all copies issued so far
have ended, whenever a module needs one of them: meanwhile nothing more is issued, neither the next copies nor any
arithmetic, and both stand still in turn. Its stream of arithmetic waits for the one of copies anyway, and it limits
itself how far the host runs ahead of the copies, as it does on several ranks.

[Note: shards that are being copied] What the host's wait also did: after it, the host could write the shard. Now a copy
may still be to come when DeepSpeed calls its weight gathered. The host writes shards between passes only, and waits for
the copies at the end of each pass (:meth:`TenCacheCoordinator.finish_gathers`). Staging buffers go back with an event.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle, NoGatherHandle, ZeroParamStatus


class OrderedGather:
    """A DeepSpeed handle of copies that have been issued on a stream. See [Note: shards that are being copied].

    Args:
        params: whose gathered values these are.
        stream: of the device.
    """

    def __init__(self, params: Iterable[Any], stream: Any) -> None:
        self._params = tuple(params)
        self._stream = stream
        self._waited = False

    def wait(self, **_: Any) -> None:
        """The current stream waits for the copies, and the weights are gathered in DeepSpeed's eyes. Further calls, for
        the other weights, do nothing. DeepSpeed's fetch calls it on the stream of the copies, for which the stream of
        arithmetic then waits."""
        if self._waited:
            return
        self._waited = True
        current = get_accelerator().current_stream()
        if current != self._stream:
            current.wait_stream(self._stream)
        for param in self._params:
            param.ds_status = ZeroParamStatus.AVAILABLE


def finish_after_forward(module: torch.nn.Module, finish: Callable[[], None]) -> Any:
    """Has the host wait for copies at the end of each forward pass, even one that fails.

    Args:
        module: the model.
        finish: waits (:meth:`TenCacheCoordinator.finish_gathers`).

    Returns:
        the hook's handle.
    """
    return module.register_forward_hook(lambda *_: finish(), always_call=True)


def order_on_device(in_flight: UserDict[Any, Any], params: Iterable[Any], stream: Any) -> bool:
    """Replaces the handles of copies that were just issued; whether there were any.

    Args:
        in_flight: DeepSpeed's handles by parameter.
        params: that it may have begun to gather.
        stream: on which it does.
    """
    copied: dict[int, list[Any]] = {}
    for param in params:
        handle = in_flight.get(param)
        if isinstance(handle, (NoGatherHandle, NoGatherCoalescedHandle)):
            copied.setdefault(id(handle), []).append(param)
    for group in copied.values():
        gather = OrderedGather(group, stream)
        for param in group:
            in_flight.data[param] = gather  # item assignment refuses to replace one
    return bool(copied)
