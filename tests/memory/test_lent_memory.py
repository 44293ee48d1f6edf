# SPDX-License-Identifier: Apache-2.0
"""GPU memory that torch's allocator takes back, on a GPU: for allocations that would fail otherwise, with kernels in
flight, with a limit of the process, while a graph is being captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tencache_ds.errors import MemoryLimitError
from tencache_ds.memory.device_memory import CudaMemory, Loan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GIB = 2**30
PIECE = GIB // 4
LEFT = 6 * GIB
"""What the tests leave of the GPU."""


class Card:
    """A GPU with little memory, and loans with known contents."""

    def __init__(self) -> None:
        from tencache_ds.ops.tencache_lend import load_tencache_lend

        torch.cuda.init()
        gc.collect()
        torch.cuda.empty_cache()
        self.op = load_tencache_lend().open_device(0)
        self.memory = CudaMemory(torch.device("cuda", 0), lambda target, source: target.copy_(source), self.op)
        self.taken_before = self.memory.taken_nbytes
        self.ballast = self.allocate(self.memory.usage().free_nbytes - LEFT)
        for _ in range(2):  # what was requested for it is forgotten
            self.memory.step_done(LEFT)
        self.loans: list[tuple[Loan, torch.Tensor]] = []

    @staticmethod
    def allocate(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def expect(self, nbytes: int) -> None:
        """A request of that size has been seen in this step, in memory that is free."""
        self.allocate(nbytes)
        torch.cuda.empty_cache()

    def lend(self, count: int) -> None:
        for rank in range(len(self.loans), len(self.loans) + count):
            image = torch.zeros(PIECE, dtype=torch.uint8)
            loan = self.memory.lend(PIECE, image, rank)
            loan.memory.fill_(rank + 1)
            self.loans.append((loan, image))

    @property
    def taken(self) -> list[bool]:
        return [loan.taken for loan, _ in self.loans]

    def check(self) -> None:
        with self.memory.holding():  # what is read here allocates a little
            for rank, (loan, image) in enumerate(self.loans):
                values = image if loan.taken else loan.memory
                assert int(values.min()) == int(values.max()) == rank + 1

    def close(self) -> None:
        for loan, _ in self.loans:
            loan.end()
        del self.ballast
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def card() -> Iterator[Card]:
    card = Card()
    yield card
    card.close()


def test_an_allocation_gets_what_was_lent_and_no_byte_is_lost(card):
    card.expect(GIB)
    card.lend(20)  # 5 GiB of 6
    before = card.op.lent_nbytes
    memory = card.allocate(GIB)
    assert memory.numel() == GIB
    n_taken = sum(card.taken)
    assert 1 <= n_taken <= 2
    assert card.taken == [False] * (20 - n_taken) + [True] * n_taken, "the highest ranks first"
    assert card.op.lent_nbytes == before - n_taken * PIECE
    assert card.memory.taken_nbytes - card.taken_before == n_taken * PIECE
    card.check()


def test_at_the_peak_of_a_step_no_second_request_of_its_largest_size_is_expected(card):
    card.expect(2 * GIB)
    largest = card.allocate(2 * GIB)
    card.lend(11)  # which leaves 1.25 GiB
    assert card.allocate(PIECE // 4).numel() == PIECE // 4
    assert not any(card.taken)
    del largest
    torch.cuda.empty_cache()
    card.lend(8)
    assert card.allocate(2 * GIB).numel() == 2 * GIB
    assert 0 < sum(card.taken) < len(card.taken)
    card.check()


def test_a_loan_that_is_held_by_itself_stays_and_others_are_taken(card):
    card.expect(2 * GIB)
    card.lend(20)
    with card.memory.holding(card.loans[-1][0]):
        assert card.allocate(2 * GIB).numel() == 2 * GIB
    assert not card.taken[-1]
    assert any(card.taken)
    card.check()


def test_a_kernel_in_flight_is_waited_for(card):
    card.lend(20)
    loan, image = card.loans[-1]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**9)
        loan.memory.fill_(77)
    card.allocate(2 * GIB)
    assert loan.taken
    assert int(image.min()) == int(image.max()) == 77


def test_a_request_of_unknown_size_gets_everything(card):
    """No request so far was nearly as large: the driver refuses, and torch asks again."""
    card.lend(20)
    memory = card.allocate(LEFT - GIB // 2)
    assert memory.numel() > 5 * GIB
    assert all(card.taken)
    card.check()


def test_what_is_held_stays(card):
    card.lend(20)
    with card.memory.holding(), pytest.raises(torch.OutOfMemoryError):
        card.allocate(2 * GIB)
    assert not any(card.taken)
    card.memory.step_done(LEFT)
    assert card.allocate(2 * GIB).numel() == 2 * GIB


def test_without_room_in_host_memory_nothing_is_taken(card):
    card.lend(20)
    card.memory.step_done(PIECE - 1)
    with pytest.raises(torch.OutOfMemoryError):
        card.allocate(2 * GIB)
    assert not any(card.taken)
    assert card.op.n_refused > 0


def test_loans_count_for_a_limit_of_the_process(card):
    card.expect(2 * GIB)
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + 3 * GIB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    assert card.memory.usage().free_nbytes <= 3 * GIB
    card.lend(11)
    assert card.memory.usage().free_nbytes <= PIECE
    with pytest.raises(MemoryLimitError):
        card.lend(2)
    memory = card.allocate(2 * GIB)
    assert memory.numel() == 2 * GIB
    assert torch.cuda.memory_reserved() + card.op.lent_nbytes <= limit
    card.check()


def test_a_graph_that_is_being_captured_is_left_alone(card):
    values = torch.ones(2**20, device="cuda")
    first = torch.cuda.CUDAGraph()  # as long as there is none, a capture begins with allocations
    with torch.cuda.graph(first):
        values * 2
    card.lend(20)
    torch.cuda.synchronize()
    assert not any(card.taken)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = values * 2
        torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert not any(card.taken)
    graph.replay()
    assert float(doubled.sum()) == 2 * 2**20
    del first


def test_the_address_of_a_loan_may_be_lent_again(card):
    """One that was taken back and has not ended yet is not mistaken for it."""
    card.lend(20)
    memory = card.allocate(3 * GIB)
    del memory
    torch.cuda.empty_cache()
    card.lend(8)
    card.check()
