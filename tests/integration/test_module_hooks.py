# SPDX-License-Identifier: Apache-2.0
"""Hooks taken off a module come back where they were."""

from __future__ import annotations

from typing import Any

import torch

from tencache_ds.integration.module_hooks import _WithGradients
from tencache_ds.integration.suspended_hooks import _Taken


def test_hooks_come_back_in_their_order() -> None:
    module = torch.nn.Identity()
    calls: list[str] = []

    def named(name: str) -> Any:
        return lambda *_: calls.append(name)

    module.register_forward_pre_hook(named("before"))
    handles = [module.register_forward_pre_hook(named(name)) for name in ("gather", "backward")]
    module.register_forward_pre_hook(named("after"))
    module.register_forward_pre_hook(named("first"), prepend=True)
    hooks = module._forward_pre_hooks
    order = list(hooks)
    taken = [_Taken(hooks, handle.id, hooks.pop(handle.id), order) for handle in handles]
    module.register_forward_pre_hook(named("later"))
    module(torch.zeros(1))
    assert calls == ["first", "before", "after", "later"]
    calls.clear()
    for each in taken:
        each.put_back()
    module(torch.zeros(1))
    assert calls == ["first", "before", "gather", "backward", "after", "later"]
    handles[0].remove()
    calls.clear()
    module(torch.zeros(1))
    assert calls == ["first", "before", "backward", "after", "later"]


def test_hooks_for_a_backward_pass_are_skipped_in_evaluation_without_gradients_only() -> None:
    module = torch.nn.Identity()
    calls: list[bool] = []
    module.register_forward_hook(_WithGradients(lambda *_: calls.append(True)))
    for training, gradients in ((True, True), (True, False), (False, True)):
        module.train(training)
        with torch.set_grad_enabled(gradients):
            module(torch.zeros(1))
    assert len(calls) == 3
    module.eval()
    with torch.no_grad():
        module(torch.zeros(1))
    assert len(calls) == 3
