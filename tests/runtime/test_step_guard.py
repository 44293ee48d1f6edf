# SPDX-License-Identifier: Apache-2.0
"""Whether a step is void, whoever fails and wherever; two ranks as two threads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.errors import TenCacheError, VoidStepError
from tencache_ds.integration import agreement
from tencache_ds.integration.agreement import JobVotes
from tencache_ds.runtime.step_guard import Part, StepGuard

pytestmark = pytest.mark.timeout(60)


class Alone:
    """The votes of one rank."""

    def passed(self, point: str) -> list[int]:
        return []

    def failed(self, point: str) -> None:
        pass


class Failure(BaseException):
    """Neither an ``Exception`` nor one of ours, as ``KeyboardInterrupt``."""


def fail_half_way(guard: StepGuard, *, behind: bool = False, part: Part = Part.TRAINED) -> None:
    with guard.step():
        guard.begin_change(part)
        if behind:
            guard.update_begins()
        raise Failure("made up")


def fail_to_load(guard: StepGuard, part: Part = Part.TRAINED) -> None:
    with guard.loading():
        guard.begin_change(part)
        guard.replaced(part)
        raise Failure("made up")


def load(guard: StepGuard, *parts: Part) -> None:
    with guard.loading():
        for part in parts:
            guard.begin_change(part)
            guard.replaced(part)


def test_a_failure_before_the_first_change_leaves_a_step_undone():
    guard = StepGuard(Alone())
    with pytest.raises(Failure), guard.step():
        raise Failure
    guard.check()
    with guard.step():
        guard.begin_change()
    guard.check()


@pytest.mark.parametrize("behind", [False, True])
def test_a_step_that_has_begun_to_change_something_is_void_until_all_of_it_is_replaced(behind):
    guard = StepGuard(Alone())
    with pytest.raises(Failure):
        fail_half_way(guard, behind=behind)
    if behind:
        guard.update_ended()  # that of this step, which has no meaning any more
    for _ in range(2):
        with pytest.raises(VoidStepError, match=r"Failure: made up.*load_checkpoint"):
            guard.check()
    with pytest.raises(VoidStepError):
        fail_half_way(guard)
    load(guard)
    assert guard.void
    with pytest.raises(Failure):
        fail_to_load(guard)
    assert guard.void
    with guard.loading():
        guard.check()
        guard.begin_change()
        guard.replaced(Part.TRAINED)
        assert guard.void
    guard.check()


def test_a_step_within_a_step_is_part_of_it():
    guard = StepGuard(Alone())

    def fail() -> None:
        with guard.step():
            with guard.step():
                guard.begin_change()
            raise Failure  # a counter of the outer one has not been changed

    with pytest.raises(Failure):
        fail()
    assert guard.void


@pytest.mark.parametrize("n", [1, 2])
def test_an_interrupt_waits_for_the_end_of_a_step_and_a_second_one_does_not(n):
    guard, handler, ended = StepGuard(Alone()), signal.getsignal(signal.SIGINT), []

    def step() -> None:
        with guard.step():
            guard.begin_change()
            for _ in range(n):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert guard.void == (n == 2) == (not ended)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_of_the_users_own_is_called_later_and_an_ignored_signal_stays_so():
    guard, seen = StepGuard(Alone()), []
    former = signal.signal(signal.SIGINT, lambda *_: seen.append(guard.void))
    try:
        with guard.loading():
            os.kill(os.getpid(), signal.SIGINT)
            assert not seen
        assert seen == [False]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with guard.step():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_update_in_the_background_decides_when_it_ends():
    guard = StepGuard(Alone())
    with guard.step():
        guard.begin_change()
        guard.update_begins()
    guard.check()
    guard.update_failed(Failure("in the background"))
    with pytest.raises(VoidStepError, match="in the background"):
        guard.check()
    with guard.loading():
        guard.replaced(Part.TRAINED)
    with guard.step():
        guard.begin_change()
        guard.update_begins()
    guard.update_ended()
    guard.check()


def test_a_load_that_fails_half_way_is_void_too_and_so_it_stays_without_what_it_has_changed():
    guard = StepGuard(Alone())
    with pytest.raises(Failure):
        fail_to_load(guard, Part.FROZEN)
    assert guard.void
    load(guard, Part.TRAINED)
    assert guard.void
    load(guard, Part.FROZEN, Part.TRAINED)
    guard.check()


def test_the_next_engine_of_the_same_weights_inherits_a_void_step():
    former, guard = StepGuard(Alone()), StepGuard(Alone())
    guard.inherit(former)
    guard.check()
    with pytest.raises(Failure):
        fail_half_way(former)
    guard.inherit(former)
    with pytest.raises(VoidStepError, match="made up"):
        guard.check()


EVENTS = ("step", "fails", "fails_early", "behind", "behind_fails", "load", "load_fails", "load_weights")


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_void_is_what_a_list_of_events_says(events):
    guard, void = StepGuard(Alone()), False
    for event in events:
        if event.startswith("load"):
            with contextlib.suppress(Failure):
                fail_to_load(guard) if event == "load_fails" else load(guard, *[Part.TRAINED] * (event == "load"))
            void = event == "load_fails" or (void and event != "load")
        elif void:
            with pytest.raises(VoidStepError):
                fail_half_way(guard)
        else:
            with contextlib.suppress(Failure), guard.step():
                if event == "fails_early":
                    raise Failure
                guard.begin_change()
                if event == "fails":
                    raise Failure
                if event.startswith("behind"):
                    guard.update_begins()
            if event == "behind":
                guard.update_ended()
            if event == "behind_fails":
                guard.update_failed(Failure())
            void = event in ("fails", "behind_fails")
        assert guard.void == void


# Several ranks


def on_ranks(*programs):
    """Runs one program for each rank, at the same time; returns the error of each."""
    store, errors = torch.distributed.HashStore(), [None] * len(programs)

    def run(rank: int) -> None:
        try:
            programs[rank](StepGuard(JobVotes("engine", store, rank, len(programs), 20.0)))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_ranks_that_all_do_well_go_on():
    def program(guard):
        for _ in range(20):
            with guard.together("a step"):
                pass

    assert on_ranks(program, program, program) == [None] * 3


def test_a_rank_that_fails_does_not_wait_and_the_others_raise_at_the_same_place():
    def fails(guard):
        with guard.together("a step"):
            pass
        with pytest.raises(Failure), guard.together("a step"):
            raise Failure
        with guard.together("a step"):
            pass

    def does_well(guard):
        with guard.together("a step"):
            pass
        with pytest.raises(TenCacheError, match="rank 1 failed at a step"), guard.together("a step"):
            pass
        with guard.together("a step"):
            pass

    assert on_ranks(does_well, fails, does_well) == [None] * 3


def test_a_step_that_another_rank_could_not_end_is_void_here_too():
    def update(guard, error):
        with guard.step(), guard.together("an update") as passed:
            guard.begin_change()
            if error:
                raise Failure
            passed()
            raise AssertionError("this rank would go on")

    def fails(guard):
        with pytest.raises(Failure):
            update(guard, True)

    def does_well(guard):
        with pytest.raises(TenCacheError):
            update(guard, False)
        with pytest.raises(VoidStepError, match="rank 0 failed"):
            guard.check()

    assert on_ranks(fails, does_well) == [None] * 2


def test_a_rank_that_never_comes_is_an_error():
    store = torch.distributed.HashStore()
    with pytest.raises(TenCacheError, match="1 of 2 ranks did not come to a step within 0 s"):
        JobVotes("engine", store, 0, 2, 0.2).passed("a step")


def test_ranks_that_never_come_are_named_once_all_others_wait(monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.1)
    store, errors = torch.distributed.HashStore(), {}

    def waits(rank):
        try:
            JobVotes("engine", store, rank, 4, 1.0).passed("a step")
        except TenCacheError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=waits, args=(rank,)) for rank in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(errors) == [0, 3]
    for error in errors.values():
        assert error.startswith("ranks 1, 2 did not come to a step within 1 s: ")
