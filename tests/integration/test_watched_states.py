# SPDX-License-Identifier: Apache-2.0
"""``optimizer.state`` waits for a step that is under way."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tencache_ds.integration.watched_tensors import WatchedStates

PARAMETERS = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
FIRST, SECOND, NEW = PARAMETERS


def merged(states: Any) -> Any:
    states |= {NEW: 3}
    return states


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda states: (change(states), dict(states))


LOOKS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda states: (states[FIRST], states[NEW]),
    "get": lambda states: (states.get(FIRST), states.get(NEW), states.get(NEW, 3)),
    "keys": lambda states: list(states.keys()),
    "values": lambda states: list(states.values()),
    "items": lambda states: list(states.items()),
    "iteration": list,
    "reversed": lambda states: list(reversed(states)),
    "copy": lambda states: states.copy(),
    "copy.copy": copy.copy,
    "dict": dict,
    "**": lambda states: {**{str(id(key)): value for key, value in states.items()}},
    "merged into another": lambda states: {NEW: 4} | dict(states),
    "update of another": lambda states: (other := {NEW: 4}, other.update(states))[0],
    "|": lambda states: states | {NEW: 4},
    "| on the right": lambda states: {NEW: 4} | states,
    "|=": merged,
    "== to the left": lambda states: (states == {FIRST: {"step": 1}, SECOND: {}}, states != {}),
    "== to the right": lambda states: ({FIRST: {"step": 1}, SECOND: {}} == states, {} != states),  # noqa: SIM300
    "repr": repr,
    "str": str,
    "pop": changed(lambda states: states.pop(FIRST)),
    "pop without": changed(lambda states: states.pop(NEW, 7)),
    "popitem": changed(lambda states: states.popitem()),
    "setdefault": changed(lambda states: (states.setdefault(FIRST, 5), states.setdefault(NEW, 5))),
    "update": changed(lambda states: states.update({NEW: 5})),
    "[] =": changed(lambda states: states.__setitem__(FIRST, 5)),
    "del": changed(lambda states: states.__delitem__(FIRST)),
    "clear": changed(lambda states: states.clear()),
}


@pytest.mark.parametrize("name", LOOKS)
def test_every_look_waits_and_is_that_of_a_plain_one(name: str) -> None:
    def contents() -> Any:
        return collections.defaultdict(dict, {FIRST: {"step": 1}, SECOND: {}})

    waits: list[int] = []
    expected = LOOKS[name](contents())
    actual = LOOKS[name](WatchedStates(contents(), lambda: waits.append(1)))
    assert waits
    assert actual == expected
    if name != "|=":  # which is itself
        assert type(actual) is type(expected)


def test_every_method_of_a_dict_is_the_watched_ones_own() -> None:
    at_once = {"__contains__", "__len__", "__missing__", "__new__", "__init__", "__getattribute__", "__sizeof__"}
    at_once |= {"__class_getitem__", "__doc__", "__lt__", "__le__", "__gt__", "__ge__"}  # dicts have no order
    for base in (dict, collections.defaultdict):
        of_dicts = {name for name, value in vars(base).items() if callable(value) or name == "fromkeys"}
        assert of_dicts - at_once <= vars(WatchedStates).keys()


def test_copies_are_plain() -> None:
    waits: list[int] = []
    states = WatchedStates({FIRST: {"step": 1}}, lambda: waits.append(1))
    assert FIRST in states
    assert len(states) == 1
    assert bool(states)
    assert not waits
    for plain in (states.plain(), copy.deepcopy(states), pickle.loads(pickle.dumps(states))):
        assert type(plain) is collections.defaultdict
        assert plain["a fourth"] == {}
    assert len(waits) == 2
    assert states.plain()[FIRST] is states.copy()[FIRST] is states[FIRST]
    assert states.fromkeys([1]) == {1: None}


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
