# SPDX-License-Identifier: Apache-2.0
"""A step is whole or void: wherever and whoever fails, no use of half-changed weights and states succeeds until a load
has replaced all of them; and a failure before the first change costs nothing.

The table in ``docs/failures.md`` lists the results.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(400)

PROGRAM = "void_cases.py"
ON_CPU = {"gpu_memory": 0}
"""State whose update is that of the CPU, on a GPU too."""
ALONE = ON_CPU | {"overlap_step": False}
RAM = ON_CPU | {"host_memory": "1GiB"}
COMMON = {"model": "mlp", "zero": {"gather_16bit_weights_on_model_save": True}}
ACCUMULATED = {"accumulation": 2, "clipping": 0.5}
SCHEDULED = {"scheduler": True}
NOT_OFFLOADED = {"offload_optimizer": "none", "optimizer": "torch_adamw"}
MUON = {"muon": True}
"""What a case shares with stock's."""

REFERENCES: dict[str, dict[str, Any]] = {
    "plain": {}, "accumulated": ACCUMULATED, "scheduled": SCHEDULED, "not_offloaded": NOT_OFFLOADED,
    "muon": MUON,
}  # fmt: skip

RAISES = {"error": "RuntimeError", "memory": "MemoryError", "storage": "StorageError", "interrupt": "KeyboardInterrupt",
          "exit": "SystemExit"}  # fmt: skip


def chunk(what: str, at: int = 6, **more: Any) -> dict[str, Any]:
    return {"where": "chunk", "what": what, "at": at, **more}


def io(rule: str, **more: Any) -> dict[str, Any]:
    return {"where": "io", "rule": f"{rule},kind=eio,match=optimizer,times=1", **more}


VOID: dict[str, dict[str, Any]] = {
    "first_chunk": chunk("error", 1, tencache=ALONE),
    **{f"training_thread_{what}": chunk(what, tencache=ALONE) for what in RAISES},
    **{
        f"background_{what}": chunk(what, 12, behind=True, tencache=ON_CPU)
        for what in ("error", "interrupt", "storage")
    },
    "ram": chunk("error", tencache=RAM | ALONE),
    "ram_background": chunk("error", 12, behind=True, tencache=RAM),
    "native_read": io("op=read,after=14", tencache=ALONE),
    "before_the_first_chunk": {"where": "scale"},
    "after_the_last_chunk": {"where": "post_step"},
    "after_the_last_chunk_interrupt": {"where": "post_step", "what": "interrupt"},
    "muon": {"where": "matrix", **MUON},
    "momentum": {"where": "momentum", "what": "storage", "at": 2, **MUON},
    "scheduler": {"where": "scheduler", **SCHEDULED},
    "accumulated": chunk("error", tencache=ALONE, **ACCUMULATED),
    "accumulated_background": chunk("error", 12, behind=True, tencache=ON_CPU, **ACCUMULATED),
    "not_offloaded": {"where": "scale", **NOT_OFFLOADED},
    "load_at_its_beginning": {"where": "load"},
    "another_engine": chunk("error", tencache=ALONE, rebuilt=True),
    "load_half_way": {"where": "load", "at": 2},
}
"""What leaves a void step."""

UNDONE: dict[str, dict[str, Any]] = {
    "norm": {"where": "norm"},
    "norm_interrupt": {"where": "norm", "what": "interrupt"},
    "norm_accumulated": {"where": "norm", **ACCUMULATED},
    "forward": {"where": "forward"},
    "backward": {"where": "gradients"},
    "backward_later": {"where": "gradients", "at": 2},
    "backward_interrupt": {"where": "gradients", "what": "interrupt"},
    "backward_accumulated": {"where": "gradients", **ACCUMULATED},
}
"""What leaves it undone: it is tried again."""

WHOLE = {
    "signal_in_a_step": chunk("signal", tencache=ALONE),
    "signal_behind_a_step": chunk("signal", 12, behind=True, tencache=ON_CPU),
    "signal_in_a_load": {"where": "load", "what": "signal"},
}
"""Interrupts that wait for the end of what they come into."""

MIXED = {"mixed": {"where": "gradients", "at": 2, "mixed": True, **ACCUMULATED}}

LONG = {
    "training_thread_memory", "training_thread_exit", "background_interrupt", "background_storage",
    "after_the_last_chunk_interrupt", "norm_interrupt", "backward_interrupt",
}  # fmt: skip
"""Another kind of exception where others are raised too."""
ON_ONE_RANK = ("first_chunk", "training_thread_storage", "ram", "load_half_way", "muon", "momentum")
UNDONE_ON_ONE_RANK = {"beginning": {"where": "begin"}}


def stock_of(case: dict[str, Any]) -> str:
    for name, shared in REFERENCES.items():
        if shared and shared.items() <= case.items():
            return name
    return "plain"


def cases_of(void: dict[str, Any], undone: dict[str, Any], **more: Any) -> list[tuple[str, dict[str, Any], str]]:
    cases = void | {name: {**case, "again": True} for name, case in undone.items()}
    used = {stock_of(case) for case in cases.values()}
    stock = [(name, {**COMMON, **REFERENCES[name], "name": name}, "stock") for name in REFERENCES if name in used]
    return [*stock, *((name, {**COMMON, **case, **more, "name": name}, "tencache") for name, case in cases.items())]


@pytest.fixture(scope="module")
def alone(harness: Any, pytestconfig: pytest.Config) -> Any:
    void, undone = ({name: of[name] for name in wanted(pytestconfig, of, LONG)} for of in (VOID, UNDONE))
    whole = {name: case | {"whole": True} for name, case in WHOLE.items()}
    return harness.run(cases_of(void | MIXED | whole, undone), program=PROGRAM, timeout_s=380)


@pytest.fixture(scope="module")
def together(harness: Any) -> Any:
    """The second of two ranks fails."""
    void = {name: VOID[name] for name in ON_ONE_RANK}
    return harness.run(cases_of(void, UNDONE_ON_ONE_RANK, rank=1), ranks=2, program=PROGRAM, timeout_s=380)


def check_void(outcome: Any, name: str, rank: int = 0) -> dict[str, Any]:
    result = outcome.result(name, "tencache", rank)
    assert set(result["uses"].values()) == {"VoidStepError"}, result["uses"]
    assert result["loads"] == {"nothing": "done", "damaged": "RuntimeError", "module only": "VoidStepError",
                               "without states": "VoidStepError"}  # fmt: skip
    assert all(after == ["VoidStepError"] * 2 for after in result["after loads"].values()), result["after loads"]
    assert result["latest"] == "good"
    assert not result["saved"]
    check_right(outcome, name, VOID[name], rank)
    return result


def check_right(outcome: Any, name: str, case: dict[str, Any], rank: int = 0) -> None:
    result, stock = outcome.result(name, "tencache", rank), outcome.result(stock_of(case), "stock", rank)
    assert result["losses"] == stock["losses"]
    assert result["weights"] == stock["weights"]


@pytest.mark.parametrize("name", marked(VOID, LONG))
def test_nothing_but_a_load_of_everything_succeeds_after_a_step_that_failed_half_way(alone: Any, name: str) -> None:
    result = check_void(alone, name)
    expected = RAISES[VOID[name].get("what", "error")] if "rule" not in VOID[name] else "StorageError"
    assert result["failure"] in (expected, "VoidStepError")
    assert result["failure"] == expected or VOID[name].get("behind")


@pytest.mark.parametrize("name", marked(UNDONE, LONG))
def test_what_fails_before_the_first_change_is_tried_again(alone: Any, name: str) -> None:
    result = alone.result(name, "tencache")
    assert result["failure"] == RAISES[UNDONE[name].get("what", "error")]
    assert result["again"] == "done"
    check_right(alone, name, UNDONE[name])


@pytest.mark.parametrize("name", WHOLE)
def test_a_signal_waits_for_the_end_of_a_step_or_a_load(alone: Any, name: str) -> None:
    assert alone.result(name, "tencache")["failure"] == "KeyboardInterrupt"
    check_right(alone, name, WHOLE[name])


def test_gradients_of_a_micro_step_that_failed_are_in_the_way_of_the_step(alone: Any) -> None:
    result = alone.result("mixed", "tencache")
    assert (result["failure"], result["mixed"]) == ("RuntimeError", "TenCacheError")
    check_right(alone, "mixed", MIXED["mixed"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_a_step_that_one_rank_could_not_end_is_void_on_all(together: Any, name: str, rank: int) -> None:
    result = check_void(together, name, rank)
    assert result["failure"] == (RAISES[VOID[name].get("what", "error")] if rank == 1 else "TenCacheError")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_rank_could_not_begin_is_undone_on_all(together: Any, rank: int) -> None:
    result = together.result("beginning", "tencache", rank)
    assert result["failure"] == ("RuntimeError" if rank == 1 else "TenCacheError")
    assert result["again"] == "done"
    check_right(together, "beginning", {}, rank)
