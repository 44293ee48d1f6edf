# SPDX-License-Identifier: Apache-2.0
"""``optimizer.state`` of an optimizer whose step may still be under way."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any


class WatchedStates(collections.defaultdict[Any, Any]):
    """A torch optimizer's ``state`` that waits for the step before it shows anything.

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

    def __getitem__(self, key: Any) -> Any:
        self._finish()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """See :meth:`dict.get`."""
        self._finish()
        return super().get(key, default)

    def items(self) -> Any:
        """See :meth:`dict.items`."""
        self._finish()
        return super().items()

    def values(self) -> Any:
        """See :meth:`dict.values`."""
        self._finish()
        return super().values()

    def __reduce__(self) -> Any:
        self._finish()
        return self.plain().__reduce__()
