# SPDX-License-Identifier: Apache-2.0
"""Size classes of a staging pool: which slot sizes, how many of each.

Source: 10Cache, "size-class based buffer pool" (the distribution of tensor sizes decides the slots). Two things differ
here: the waste of a slot is bounded, and the number of slots of a class never exceeds the number of its items.

Everything is a pure function of integers: no torch, no I/O, callable from any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tencache_ds.errors import MemoryLimitError
from tencache_ds.layout import round_up


@dataclass(frozen=True, slots=True)
class SizeClass:
    """``count`` slots of ``slot_nbytes`` bytes each.

    Attributes:
        slot_nbytes: size of one slot in bytes, a multiple of :data:`PAGE_NBYTES`.
        count: number of slots, at least 1.
    """

    slot_nbytes: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole class."""
        return self.slot_nbytes * self.count


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Neighbouring item sizes that share one slot size."""

    slot_nbytes: int
    n_items: int


def plan_size_classes(
    item_nbytes: Sequence[int],
    budget_nbytes: int,
    *,
    max_waste: float = 0.125,
    max_classes: int = 12,
    min_count: int = 2,
) -> tuple[SizeClass, ...]:
    """Choose slot sizes and counts for the items that pass through a pool.

    Args:
        item_nbytes: size in bytes of every item; a size that occurs twice stands for two items. Each is rounded up to
            :data:`PAGE_NBYTES`.
        budget_nbytes: the classes together never take more than this.
        max_waste: largest unused part of a slot, as a fraction of the slot, that an item may leave. The fewest classes
            that keep it are used (few classes share slots better), placed so that the items waste the fewest bytes.
            Where more than ``max_classes`` would be needed, ``max_classes`` classes of least total waste are used.
        max_classes: largest number of classes.
        min_count: slots each class gets before the rest of the budget is shared, unless it has fewer items.

    Returns:
        The classes by ascending slot size; empty for no items. The budget is shared in proportion to the bytes of the
        classes' items, and what rounding leaves over goes to classes that still want slots. A larger budget never gives
        fewer bytes in total.

    Raises:
        MemoryLimitError: even the minimum does not fit the budget; the message names the smallest budget that works.
        ValueError: an argument is out of its range.
    """
    clusters = _cluster(item_nbytes, max_waste, max_classes, min_count)
    counts = [min(min_count, cluster.n_items) for cluster in clusters]
    left_nbytes = budget_nbytes - sum(c.slot_nbytes * n for c, n in zip(clusters, counts, strict=True))
    if left_nbytes < 0:
        raise MemoryLimitError(
            f"staging needs at least {budget_nbytes - left_nbytes} bytes ({len(clusters)} size classes, up to "
            f"{min_count} slots each, largest item {clusters[-1].slot_nbytes} bytes) but its budget is {budget_nbytes} "
            f'bytes; set "tencache.staging_memory" to {budget_nbytes - left_nbytes} bytes or more'
        )
    # The order in which slots are wanted does not depend on the budget: slot t of n goes at (t - 1/2) / n of the way,
    # so that any prefix is the rounded proportional share. Taking each slot that fits, in a fixed order, makes the
    # total monotone in the budget: where one more byte changes a decision, that decision uses the budget up exactly.
    wanted = sorted(
        ((2 * t - 1) / cluster.n_items, -cluster.slot_nbytes, i)
        for i, cluster in enumerate(clusters)
        for t in range(counts[i] + 1, cluster.n_items + 1)
    )
    for _, negative_slot_nbytes, i in wanted:
        if -negative_slot_nbytes <= left_nbytes:
            left_nbytes += negative_slot_nbytes
            counts[i] += 1
    return tuple(SizeClass(c.slot_nbytes, n) for c, n in zip(clusters, counts, strict=True))


def smallest_budget_nbytes(
    item_nbytes: Sequence[int], *, max_waste: float = 0.125, max_classes: int = 12, min_count: int = 2
) -> int:
    """Return the smallest budget in bytes with which :func:`plan_size_classes` succeeds for the same arguments."""
    clusters = _cluster(item_nbytes, max_waste, max_classes, min_count)
    return sum(c.slot_nbytes * min(min_count, c.n_items) for c in clusters)


def _cluster(item_nbytes: Sequence[int], max_waste: float, max_classes: int, min_count: int) -> list[_Cluster]:
    """Group the distinct sizes into neighbours that share a slot; see :func:`plan_size_classes`."""
    if not 0.0 <= max_waste < 1.0:
        raise ValueError(f"max_waste must be in [0, 1), got {max_waste}")
    if max_classes < 1 or min_count < 1:
        raise ValueError(f"max_classes and min_count must be at least 1, got {max_classes} and {min_count}")
    if any(nbytes <= 0 for nbytes in item_nbytes):
        raise ValueError(f"item sizes must be positive, got {min(item_nbytes)}")
    histogram = Counter(round_up(nbytes) for nbytes in item_nbytes)
    if not histogram:
        return []
    sizes = sorted(histogram)
    # first_fit[j]: the first size that may share a slot with sizes[j] under the waste bound.
    first_fit = [bisect_left(sizes, size - int(max_waste * size)) for size in sizes]
    n_classes, last = 0, len(sizes) - 1
    while last >= 0:
        last = first_fit[last] - 1
        n_classes += 1
    bounded = n_classes <= max_classes
    ends = _least_waste_partition(
        sizes, [histogram[size] for size in sizes], min(n_classes, max_classes), first_fit if bounded else None
    )
    starts = [0, *ends[:-1]]
    return [
        _Cluster(sizes[end - 1], sum(histogram[size] for size in sizes[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _least_waste_partition(
    sizes: Sequence[int], n_items: Sequence[int], n_groups: int, first_fit: Sequence[int] | None
) -> list[int]:
    """Split ``sizes`` (ascending) into ``n_groups`` runs that waste the fewest bytes; return the end index of each.

    A run wastes the sum of (its largest size - size) over its items. With ``first_fit`` given, a run that breaks the
    bound costs more than any that keeps it. Both costs satisfy the quadrangle inequality, so the best last cut moves
    monotonically with the end and divide and conquer needs O(groups * n log n) steps.
    """
    n = len(sizes)
    items_before = [0, *accumulate(n_items)]
    nbytes_before = [0, *accumulate(size * k for size, k in zip(sizes, n_items, strict=True))]
    penalty = sizes[-1] * items_before[-1] + 1

    def run_cost(start: int, end: int) -> int:
        waste = sizes[end - 1] * (items_before[end] - items_before[start]) - (nbytes_before[end] - nbytes_before[start])
        n_misfits = max(0, first_fit[end - 1] - start) if first_fit is not None else 0
        return waste + penalty * n_misfits

    best = [0] + [run_cost(0, end) for end in range(1, n + 1)]
    cuts: list[list[int]] = []
    for group in range(2, n_groups + 1):
        previous, best, cut = best, [0] * (n + 1), [0] * (n + 1)
        spans = [(group, n, group - 1, n - 1)]
        while spans:
            end_low, end_high, cut_low, cut_high = spans.pop()
            if end_low > end_high:
                continue
            end = (end_low + end_high) // 2
            best[end], cut[end] = min(
                (previous[start] + run_cost(start, end), start) for start in range(cut_low, min(cut_high, end - 1) + 1)
            )
            spans.append((end_low, end - 1, cut_low, cut[end]))
            spans.append((end + 1, end_high, cut[end], cut_high))
        cuts.append(cut)
    ends = [n]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return ends[::-1]
