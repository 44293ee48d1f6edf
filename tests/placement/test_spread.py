# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model without optimizer live in GPU memory."""

from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.inference_policy import choose_weights, spread_order


@given(st.integers(0, 300))
def test_the_order_has_every_number_once(n: int) -> None:
    assert sorted(spread_order(n)) == list(range(n))


@given(st.integers(1, 300), st.data())
def test_any_prefix_lies_nearly_evenly_apart(n: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, n))
    prefix = sorted(spread_order(n)[:length])
    gaps = [after - before for before, after in zip(prefix, [*prefix[1:], n], strict=True)]
    assert prefix[0] == 0
    assert max(gaps) <= 4 * n / length


WEIGHTS = st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=40)


@given(WEIGHTS, st.integers(0, 1000))
def test_it_fits_and_no_chosen_weight_is_chosen_twice(weights: list[tuple[int, bool]], budget: int) -> None:
    nbytes, stored = [each for each, _ in weights], [each for _, each in weights]
    chosen = choose_weights(nbytes, stored, budget)
    assert len(set(chosen)) == len(chosen)
    assert sum(nbytes[index] for index in chosen) <= budget
    left = budget - sum(nbytes[index] for index in chosen)
    assert all(nbytes[index] > left for index in range(len(nbytes)) if index not in chosen)


@given(WEIGHTS)
def test_with_room_for_all_those_on_nvme_come_first(weights: list[tuple[int, bool]]) -> None:
    nbytes, stored = [each for each, _ in weights], [each for _, each in weights]
    chosen = choose_weights(nbytes, stored, sum(nbytes))
    assert sorted(chosen) == list(range(len(weights)))
    assert [stored[index] for index in chosen] == sorted(stored, reverse=True)


def test_half_of_equal_weights_are_every_second_one() -> None:
    assert sorted(choose_weights([10] * 8, [False] * 8, 40)) == [0, 2, 4, 6]
