# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.activation_policy import (
    MOST_AHEAD_NBYTES,
    MoveRates,
    RecordedPass,
    SavedBlock,
    place_unplanned,
    plan_places,
    reload_order,
    reload_window_nbytes,
)
from tencache_ds.placement.places import Place

G, H, N = Place.GPU, Place.HOST, Place.NVME
RATES = MoveRates(out_bytes_per_s=10, back_bytes_per_s=10)


def a_pass(sizes: list[int], every_s: float = 10.0) -> list[SavedBlock]:
    """Blocks saved one after the other, and needed in reverse order at the same pace."""
    end_s = 2 * every_s * len(sizes)
    return [SavedBlock(nbytes, i * every_s, end_s - i * every_s) for i, nbytes in enumerate(sizes)]


BLOCKS = st.lists(
    st.builds(
        SavedBlock,
        st.integers(1, 100),
        st.floats(0, 100),
        st.none() | st.floats(100, 200),
        st.booleans(),
    ),
    max_size=20,
)
ALL_RATES = st.none() | st.builds(MoveRates, st.floats(0.1, 1000), st.floats(0.1, 1000))


def test_the_last_stay_those_before_go_to_host_memory_and_the_first_to_nvme():
    assert plan_places(a_pass([10] * 6), None, host_nbytes=20, has_nvme=True) == (N, N, N, N, H, H)
    # A block takes 1 s each way here; with 0.8 s from one to the next, the last one is needed too soon.
    assert plan_places(a_pass([10] * 6, 0.8), RATES, host_nbytes=20, has_nvme=True)[-1] is G
    assert plan_places(a_pass([10] * 6, 1.0), RATES, host_nbytes=20, has_nvme=True)[-1] is H


def test_copies_that_queue_up_make_later_blocks_stay():
    # Copies out take twice as long as a layer: what is saved late is needed before its turn comes.
    places = plan_places(a_pass([20] * 8, 1.0), RATES, host_nbytes=10**6, has_nvme=False)
    assert places[0] is H
    assert places[-2:] == (G, G)
    # What stays leaves the link to others: one more goes than if it had queued.
    assert sum(place is H for place in places) >= 3


def test_without_nvme_the_earliest_go_until_host_memory_is_full():
    assert plan_places(a_pass([10] * 4), None, host_nbytes=25, has_nvme=False) == (H, H, G, G)
    assert plan_places(a_pass([10] * 4), None, host_nbytes=0, has_nvme=False) == (G,) * 4


def test_a_block_held_elsewhere_stays_and_one_that_nobody_needs_goes():
    blocks = [SavedBlock(10, 0, 100, held_elsewhere=True), SavedBlock(10, 1, None), SavedBlock(10, 2, 98)]
    assert plan_places(blocks, RATES, host_nbytes=100, has_nvme=True) == (G, H, H)


def test_of_what_has_to_leave_the_earliest_go_and_what_is_late_only_if_need_be():
    blocks = a_pass([10] * 4, 0.8)  # the last one is needed too soon

    def places(to_move_nbytes: int) -> tuple[Place, ...]:
        return plan_places(blocks, RATES, host_nbytes=100, has_nvme=True, to_move_nbytes=to_move_nbytes)

    assert places(0) == places(-5) == (G, G, G, G)
    assert places(1) == places(10) == (H, G, G, G)
    assert places(11) == (H, H, G, G)
    assert places(31) == places(1000) == (H, H, H, H)


def test_blocks_that_leave_in_any_case_count_towards_what_has_to():
    blocks = [*a_pass([10] * 4), SavedBlock(10, 50, 60, held_elsewhere=True)]

    def places(to_move_nbytes: int) -> tuple[Place, ...]:
        return plan_places(
            blocks, None, host_nbytes=100, has_nvme=True, to_move_nbytes=to_move_nbytes, leaving={2, 4, 9}
        )

    assert places(0) == places(10) == (G, G, H, G, G)
    assert places(11) == (H, G, H, G, G)


@given(BLOCKS, ALL_RATES, st.integers(0, 3000))
def test_as_much_leaves_as_has_to_and_no_block_more(blocks, rates, to_move_nbytes):
    places = plan_places(blocks, rates, host_nbytes=10**6, has_nvme=False, to_move_nbytes=to_move_nbytes)
    moved = [block.nbytes for block, place in zip(blocks, places, strict=True) if place is H]
    movable = [block.nbytes for block in blocks if not block.held_elsewhere]
    assert sum(moved) >= min(to_move_nbytes, sum(movable))
    assert sum(moved) < to_move_nbytes + max(moved, default=1)


@given(BLOCKS, ALL_RATES, st.integers(0, 1000), st.booleans())
def test_every_plan_fits_and_puts_what_is_saved_earlier_further_away(blocks, rates, host_nbytes, has_nvme):
    places = plan_places(blocks, rates, host_nbytes=host_nbytes, has_nvme=has_nvme)
    assert len(places) == len(blocks)
    taken = [block.nbytes for block, place in zip(blocks, places, strict=True) if place is H]
    assert sum(taken) <= host_nbytes
    moved = [place for place in places if place is not G]
    assert moved == sorted(moved, reverse=True)
    assert has_nvme or N not in moved
    assert not any(block.held_elsewhere and place is not G for block, place in zip(blocks, places, strict=True))


@given(BLOCKS, st.builds(MoveRates, st.floats(0.1, 1000), st.floats(0.1, 1000)))
def test_what_is_moved_is_back_when_it_is_needed(blocks, rates):
    blocks = sorted(blocks, key=lambda block: block.t_saved_s)
    places = plan_places(blocks, rates, host_nbytes=10**6, has_nvme=False)
    t_s = float("-inf")
    for block, place in zip(blocks, places, strict=True):
        if place is H:
            t_s = max(t_s, block.t_saved_s) + block.nbytes / rates.out_bytes_per_s
            if block.t_needed_s is not None:
                assert t_s + block.nbytes / rates.back_bytes_per_s <= block.t_needed_s


def test_unplanned_blocks_go_to_the_fastest_place_with_room():
    assert place_unplanned(10, host_left_nbytes=10, has_nvme=True) is H
    assert place_unplanned(10, host_left_nbytes=9, has_nvme=True) is N
    assert place_unplanned(10, host_left_nbytes=-1, has_nvme=False) is G


def test_the_recorded_order_holds_for_a_pass_with_as_many_blocks():
    recorded = RecordedPass(tuple(a_pass([1, 1, 1])), (2, 0, 1))
    assert reload_order(3, recorded) == (2, 0, 1)
    assert reload_order(4, recorded) == (3, 2, 1, 0)
    assert reload_order(2, None) == (1, 0)
    assert reload_order(3, RecordedPass(recorded.blocks, ())) == (2, 1, 0)


def test_the_window_is_a_small_part_of_what_was_moved():
    assert reload_window_nbytes(800) == 100
    assert reload_window_nbytes(2**40) == MOST_AHEAD_NBYTES
