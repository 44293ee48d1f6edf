# SPDX-License-Identifier: Apache-2.0
"""``optimizer.state`` waits for a step that is under way."""

from __future__ import annotations

import collections
import copy
import pickle

import torch

from tencache_ds.integration.watched_states import WatchedStates


def test_every_look_waits_and_a_copy_is_a_plain_dict() -> None:
    waits: list[int] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    states = WatchedStates({parameter: {"step": 1}}, lambda: waits.append(1))
    looks = [
        lambda: states[parameter],
        lambda: states.get(parameter),
        lambda: list(states.items()),
        lambda: list(states.values()),
        lambda: pickle.dumps(states),
        lambda: copy.deepcopy(states),
    ]
    for number, look in enumerate(looks, 1):
        look()
        assert len(waits) >= number
    assert states["another"] == {}
    assert states.get("a third", 3) == 3
    for plain in (states.plain(), copy.deepcopy(states), pickle.loads(pickle.dumps(states))):
        assert type(plain) is collections.defaultdict
        assert plain["a fourth"] == {}
    assert states.plain()[parameter] is states[parameter]


def test_an_optimizer_works_with_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state = WatchedStates(optimizer.state, lambda: None)
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["step"] == 1
    other = torch.optim.Adam([parameter])
    other.load_state_dict(saved)
    assert other.state[parameter]["step"] == 1
