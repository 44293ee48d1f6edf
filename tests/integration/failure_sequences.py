# SPDX-License-Identifier: Apache-2.0
"""Random sequences of user actions into which failures are injected: run like ``training.py``, a seed for each case.

The property is "right, or an error on every rank within seconds, and then nothing but a load". A sequence keeps the
history of what has been trained: a step that came to its end is added, a load goes back to what was saved. At the end a
new engine of stock's trains the history from the beginning: its losses and weights are the right ones.

With ``"alone"`` a failure on one rank of several comes at a point where the others are in a collective. Its process
ends, as a script would, and the others have to get an error.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import training
import void_cases

from tencache_ds.errors import TenCacheError
from tencache_ds.io.wrappers.faults import VARIABLE

N_ACTIONS = 14
MOST_STEPS = 9
"""Longest history: stock trains each again."""

ON_ALL_RANKS = ("forward", "gradients", "norm", "begin", "scale", "chunk", "load")
"""Where failures come in the same place on every rank, or on one alone."""

IN_NO_ORDER = ("signal",)
"""Comes in another place on each rank."""

ON_ANY_RANK = ("begin", "scale", "chunk", "load")
"""Where ranks meet afterwards: one may fail while the others do not."""


def case_of(seed: int, ranks: int) -> dict[str, Any]:
    """The config of a sequence."""
    draw = random.Random(seed)
    options: dict[str, Any] = {
        "host_memory": draw.choice([0, 0, "1GiB"]),
        "overlap_step": draw.random() < 0.6 and ranks == 1,
        "chunk_size": draw.choice([2**16, 2**18]),
        "split_master": draw.random() < 0.7,
    }
    return {
        "model": draw.choice(["mlp", "mlp", "unused", "tied"]),
        "tencache": options,
        "accumulation": draw.choice([1, 1, 2]),
        "clipping": draw.choice([0.0, 0.5]),
        "sub_group_size": draw.choice([150_000, 300_000, 10**9]),
        "persistence": draw.choice([0, 1000]),
        "precision": draw.choice(["bf16", "bf16", "fp32"]),
    }


ERRORS = ("error", "memory", "storage", "interrupt", "exit")


class Sequence:
    """One engine, its random actions, and the history of what they have come to."""

    def __init__(self, case: dict[str, Any], folder: str, rank: int, ranks: int) -> None:
        self.seed, self.rank, self.ranks = case["seed"], rank, ranks
        self.draw = random.Random(self.seed * 7919 + 1)  # the same on every rank
        self.case = case | case_of(self.seed, ranks)
        self.folder = os.path.join(folder, "sequences", str(self.seed))
        self.engine = training.build(self.case, "tencache", os.path.join(folder, "nvme"))
        self.history: list[tuple[int, list[str]]] = []  # of each step: seed of its data, and losses
        self.saved: dict[str, list[tuple[int, list[str]]]] = {}
        self.log: list[str] = []
        self.must_load = False
        self.ended = ""

    # Actions

    def batches(self, number: int) -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(number * 10 + self.rank)
        n_micro = self.engine.gradient_accumulation_steps()
        return [[t.to(self.engine.device) for t in self.engine.module.batch(generator)] for _ in range(n_micro)]

    def train(self) -> None:
        number, losses = self.draw.randrange(10**6), []
        for batch in self.batches(number):
            loss = self.again(lambda batch=batch: self.one_pass(batch))
            losses.append(float(loss.detach().float()).hex())
            self.again(self.engine.step)
        self.history.append((number, losses))

    def one_pass(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.engine(*batch)
        self.engine.backward(loss)
        return loss

    def again(self, use: Any) -> Any:
        """What fails before anything has changed is tried again, once the failure is over."""
        try:
            with self.failing():
                return use()
        except BaseException as error:
            self.log.append(f"{type(error).__name__} in {getattr(use, '__name__', 'a pass')}")
            self.check_alone(error)
            if self.void():
                raise
        return use()

    def evaluate(self) -> None:
        self.engine.eval()
        try:
            with torch.no_grad():
                self.engine(*self.batches(0)[0])
        finally:
            self.engine.train()

    def gather(self) -> None:
        import deepspeed

        param = self.draw.choice([p for p in self.engine.module.parameters() if p.requires_grad])
        with deepspeed.zero.GatheredParameters([param]):
            float(param.float().sum())

    def read_state(self) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        safe_get_full_fp32_param(self.draw.choice([p for p in self.engine.module.parameters() if p.requires_grad]))

    def save(self) -> None:
        tag = f"tag{self.draw.randrange(2)}"
        with self.failing():
            self.engine.save_checkpoint(self.folder, tag=tag)
        self.saved[tag] = list(self.history)

    def load(self) -> None:
        tag = self.draw.choice(sorted(self.saved))
        with self.failing():
            self.engine.load_checkpoint(self.folder, tag=tag)
        self.history = list(self.saved[tag])
        self.must_load = False

    # Failures

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Within the block something may fail, or not."""
        if self.fault is None:
            yield
            return
        fault, self.fault = self.fault, None
        if fault["here"]:
            with void_cases.fault(fault, self.engine):
                yield
        else:
            yield

    def choose_fault(self) -> dict[str, Any] | None:
        draw = self.draw
        if draw.random() < 0.45:
            return None
        alone = self.ranks > 1 and draw.random() < 0.6
        where = draw.choice(ON_ANY_RANK if alone else (*ON_ALL_RANKS, "io", *IN_NO_ORDER[self.ranks > 1 :]))
        if self.case.get("alone"):
            where, alone = draw.choice(["forward", "gradients", "norm"]), True
        fault: dict[str, Any] = {
            "where": where,
            "what": draw.choice(["error", "memory", "storage", "interrupt", "exit"]),
        }
        fault["at"] = draw.randrange(1, {"chunk": 25, "load": 3}.get(where, 3))
        if where == "io":
            operation, match = draw.choice(["read", "write"]), draw.choice(["optimizer", "weight"])
            if self.ranks > 1:  # elsewhere ranks do not meet
                operation, match = "read", "optimizer"
            kind, after = draw.choice(["eio", "torn", "short"]), draw.randrange(20)
            if operation == "read":
                kind = "eio"
            fault["rule"] = f"op={operation},kind={kind},match={match},after={after},times=1"
        fault["seconds"] = draw.random() * 0.05
        failing_rank = draw.randrange(self.ranks)
        fault["here"] = not alone or failing_rank == self.rank
        return fault

    def void(self) -> bool:
        with contextlib.suppress(TenCacheError):
            self.engine.optimizer._finish_step()
        return bool(self.engine.optimizer.step_guard.void)

    def check_alone(self, error: BaseException) -> None:
        """Where others wait in a collective, the process of a rank that has failed ends."""
        if self.case.get("alone"):
            raise error

    # The sequence

    def run(self) -> None:
        self.fault: dict[str, Any] | None = None
        self.save()
        for _ in range(N_ACTIONS):
            if len(self.history) >= MOST_STEPS:
                break
            self.act()
            if self.ended:
                return
        self.fault = None
        if self.void():
            self.load()

    def act(self) -> None:
        draw = self.draw
        name = draw.choice(["train"] * 6 + ["save", "load", "evaluate", "gather", "read_state"])
        self.fault = self.choose_fault()
        self.log.append(f"{name} {self.fault or ''}")
        try:
            getattr(self, name)()
        except BaseException as error:
            self.log.append(f"  {type(error).__name__}: {error}"[:300])
            self.check_alone(error)
            self.fault = None
            self.recover()
        self.fault = None

    def recover(self) -> None:
        """After an error: while the step is void nothing works but a load."""
        if self.void():
            uses = {"forward": lambda: self.engine(*self.batches(0)[0]), "step": self.engine.step,
                    "gather": self.gather, "read": self.read_state}  # fmt: skip
            for name, use in uses.items():
                found = void_cases.attempt(use)
                if found != "VoidStepError":
                    raise AssertionError(f"a void step was used: {name} gave {found}")
        try:
            self.load()
        except TenCacheError as error:
            self.ended = f"{type(error).__name__}: {error}"  # a device that fails for good: an error is right
        else:
            if self.void():
                raise AssertionError("a void step outlived a load")


def replay(sequence: Sequence, folder: str) -> dict[str, Any]:
    """Stock trains the history."""
    engine = training.build(sequence.case, "stock", os.path.join(folder, "nvme"))
    losses = []
    for number, _ in sequence.history:
        for batch in sequence.batches(number):
            loss = engine(*batch)
            losses.append(float(loss.detach().float()).hex())
            engine.backward(loss)
            if engine.gradient_accumulation_steps() > 1 and engine.is_gradient_accumulation_boundary():
                training.complete_gradients(engine)
            engine.step()
        training.zero_gradients(engine)
    result = {"losses": losses, "weights": training.digests(engine.module)}
    engine.destroy()
    return result


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    os.environ[VARIABLE] = "none"
    sequence = Sequence(case, folder, rank, torch.distributed.get_world_size())
    t_start = time.monotonic()
    try:
        sequence.run()
    except BaseException as error:
        print("\n".join(sequence.log), file=sys.stderr, flush=True)
        failure = f"{type(error).__name__} after {time.monotonic() - t_start:.1f} s: {error}"
        if case.get("alone") and not torch.cuda.is_available():  # else the harness would end the other rank
            return {"failed": failure}
        raise RuntimeError(f"seed {sequence.seed}: {failure}") from error
    result: dict[str, Any] = {"ended": sequence.ended, "steps": len(sequence.history), "log": sequence.log}
    if not sequence.ended:
        here = {
            "losses": [loss for _, losses in sequence.history for loss in losses],
            "weights": training.digests(sequence.engine.module),
        }
        try:
            sequence.engine.destroy()
        except TenCacheError as error:
            print("\n".join(sequence.log), file=sys.stderr, flush=True)
            result["at the end"] = f"{type(error).__name__}: {error}"
        right = replay(sequence, folder)
        result["right"] = here == right
        if here != right:
            print("\n".join([f"seed {sequence.seed}", *sequence.log]), file=sys.stderr, flush=True)
    else:
        sequence.engine.destroy()
    result["threads"] = len([t for t in threading.enumerate() if t.name.startswith("tencache")])
    return result


if __name__ == "__main__":
    training.main(run)
