# SPDX-License-Identifier: Apache-2.0
"""``optimizer.state`` of an optimizer whose step may still be under way."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

_plain: Any = collections.defaultdict


def _after_step(look: Callable[..., Any]) -> Any:
    @functools.wraps(look)
    def waiting(self: WatchedStates, *args: Any, **kwargs: Any) -> Any:
        self._finish()
        return look(self, *args, **kwargs)

    return waiting


def _of_a_copy(look: Callable[..., Any]) -> Any:
    return _after_step(functools.wraps(look)(lambda self, *args: look(self.plain(), *args)))


class WatchedStates(collections.defaultdict[Any, Any]):
    """A torch optimizer's ``state`` that waits for the step before it shows or changes anything.

    Copies are plain ones. Only ``in``, ``len`` and ``bool`` do not wait: which parameters have states is known at once.

    Args:
        states: what it holds.
        finish: called before each look; returns when the step is over.
    """

    def __init__(self, states: Any, finish: Callable[[], None]) -> None:
        super().__init__(dict, states)
        self._finish = finish

    def plain(self) -> collections.defaultdict[Any, Any]:
        """The same, for those who need not wait any more."""
        return collections.defaultdict(dict, super().items())

    __getitem__ = _after_step(_plain.__getitem__)
    __setitem__ = _after_step(_plain.__setitem__)
    __delitem__ = _after_step(_plain.__delitem__)
    __iter__ = _after_step(_plain.__iter__)  # with it, dict(state) and {**state} wait too
    __reversed__ = _after_step(_plain.__reversed__)
    __ior__ = _after_step(_plain.__ior__)
    get = _after_step(_plain.get)
    keys = _after_step(_plain.keys)
    values = _after_step(_plain.values)
    items = _after_step(_plain.items)
    pop = _after_step(_plain.pop)
    popitem = _after_step(_plain.popitem)
    setdefault = _after_step(_plain.setdefault)
    update = _after_step(_plain.update)
    clear = _after_step(_plain.clear)

    # DeepSpeed and torch know a defaultdict: so do those who compare, print or pickle it.
    copy = _of_a_copy(_plain.copy)
    __copy__ = _of_a_copy(_plain.__copy__)
    __or__ = _of_a_copy(_plain.__or__)
    __ror__ = _of_a_copy(_plain.__ror__)
    __eq__ = _of_a_copy(_plain.__eq__)
    __ne__ = _of_a_copy(_plain.__ne__)
    __repr__ = _of_a_copy(_plain.__repr__)
    __reduce__ = _of_a_copy(_plain.__reduce__)
    __hash__ = None  # type: ignore[assignment]
    fromkeys = _plain.fromkeys
