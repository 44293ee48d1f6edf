# SPDX-License-Identifier: Apache-2.0
"""``training.py`` on a GPU whose streams are far apart: what one does not wait for has not happened yet.

Before each gather (``"late": "gathers"``), each module's arithmetic (``"late": "arithmetic"``), each copy of gradients
into their bucket (``"late": "reductions"``), each copy of new weights to the device (``"late": "updates"``) or of
Muon's gradients and momentum to and from where they live (``"late": "turns"``) the device sleeps. With
``"unordered"`` the stream of arithmetic does not wait for the one of gathers, or that one not for new weights, to show
that this is noticed. All batches are on the device beforehand: the host waits for no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import training
from deepspeed.runtime.zero import partition_parameters

from tencache_ds.host_path.gathers import RankGather
from tencache_ds.integration.muon import _Copies
from tencache_ds.tiers.host_update import _FusedJob
from tencache_ds.tiers.update import UpdateGate

CYCLES = 4_000_000
"""About two milliseconds."""


@contextmanager
def late_gathers() -> Iterator[None]:
    with ExitStack() as stack:
        for handle in (partition_parameters.NoGatherHandle, partition_parameters.NoGatherCoalescedHandle):
            issue = handle.__init__

            def late(self: Any, params: Any, issue: Any = issue) -> None:
                torch.cuda._sleep(CYCLES)
                issue(self, params)

            stack.enter_context(mock.patch.object(handle, "__init__", late))
        for name in ("__init__", "finish"):
            original = getattr(RankGather, name)

            def late_too(self: Any, *args: Any, original: Any = original) -> None:
                torch.cuda._sleep(CYCLES)
                original(self, *args)

            stack.enter_context(mock.patch.object(RankGather, name, late_too))
        yield


@contextmanager
def late_reductions() -> Iterator[None]:
    copy = torch._foreach_copy_

    def late(*args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(CYCLES)
        copy(*args, **kwargs)

    with mock.patch.object(torch, "_foreach_copy_", late):
        yield


@contextmanager
def late_updates() -> Iterator[None]:
    publish = _FusedJob.publish

    def late(self: Any) -> None:
        torch.cuda._sleep(CYCLES)
        publish(self)

    with mock.patch.object(_FusedJob, "publish", late):
        yield


@contextmanager
def late_turns() -> Iterator[None]:
    to_device, to_host = _Copies.to_device, _Copies.to_host

    def late_there(self: Any, *args: Any) -> Any:
        with torch.cuda.stream(self._up):
            torch.cuda._sleep(CYCLES)
        return to_device(self, *args)

    def late_back(self: Any, *args: Any) -> Any:
        with torch.cuda.stream(self._down):
            torch.cuda._sleep(CYCLES)
        return to_host(self, *args)

    with mock.patch.object(_Copies, "to_device", late_there), mock.patch.object(_Copies, "to_host", late_back):
        yield


def late_arithmetic(engine: Any) -> None:
    def sleep(*_: Any) -> None:
        torch.cuda._sleep(CYCLES)

    def sleep_in_backward(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(sleep)

    for module in engine.module.modules():
        if not any(True for _ in module.children()):
            module.register_forward_pre_hook(sleep)
            module.register_forward_hook(sleep_in_backward)


@contextmanager
def unordered(engine: Any, late: str) -> Iterator[None]:
    if late == "updates":
        updated = UpdateGate.updated

        def without_event(self: Any, keys: Any, copied: Any = None) -> None:
            updated(self, keys)

        with (
            mock.patch.object(engine.optimizer._model_weights, "order_gathers"),
            mock.patch.object(UpdateGate, "updated", without_event),
        ):
            yield
        return
    gathers = engine.optimizer._get_param_coordinator()._PartitionedParameterCoordinator__allgather_stream
    wait_stream = torch.cuda.Stream.wait_stream

    def wait(self: Any, other: Any) -> None:
        if other != gathers:
            wait_stream(self, other)

    with mock.patch.object(torch.cuda.Stream, "wait_stream", wait):
        yield


def in_host_memory(shard: torch.Tensor) -> bool:
    """And not the stand-in of a shard on NVMe."""
    return shard.device.type == "cpu" and shard.stride(0) != 0


def run(case: dict[str, Any], engine_name: str, folder: str, rank: int) -> dict[str, Any]:
    engine = training.build(case, engine_name, f"{folder}/nvme")
    generator = torch.Generator().manual_seed(1000 + rank)
    stock = engine_name == "stock"
    batches = [
        [tensor.to(engine.device) for tensor in engine.module.batch(generator)] for _ in range(case["steps"] + 1)
    ]
    engine.module.batch = lambda generator: batches.pop(0)
    with ExitStack() as stack:
        if not stock:
            pull_apart(engine, case, stack)
        result: dict[str, Any] = {"losses": training.train(engine, case["steps"], generator, oracle=stock)}
        batch = [tensor.to(engine.device) for tensor in engine.module.batch(generator)]
        with torch.no_grad():
            # The first one while the last update may still go on.
            outputs = [engine(*batch)] if stock else [engine(*batch), *evaluate_while_overwriting(engine, batch)]
            result["evaluated"] = [float(output).hex() for output in outputs]
    engine.destroy()
    return result


def pull_apart(engine: Any, case: dict[str, Any], stack: ExitStack) -> None:
    """Until the stack ends."""
    if case["late"] == "gathers":
        stack.enter_context(late_gathers())
    elif case["late"] == "reductions":
        stack.enter_context(late_reductions())
    elif case["late"] == "updates":
        stack.enter_context(late_updates())
    elif case["late"] == "turns":
        stack.enter_context(late_turns())
    else:
        late_arithmetic(engine)
    if case.get("unordered"):
        stack.enter_context(unordered(engine, case["late"]))


def evaluate_while_overwriting(engine: Any, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of a pass after which, at once, the host overwrites what was copied from, and of one after that."""
    shards = [param.ds_tensor.data for param in engine.module.parameters() if in_host_memory(param.ds_tensor)]
    kept = [shard.clone() for shard in shards]
    overwritten = engine(*batch)
    for shard in shards:
        shard.fill_(float("nan"))
    for shard, values in zip(shards, kept, strict=True):
        shard.copy_(values)
    return [overwritten, engine(*batch)]


if __name__ == "__main__":
    training.main(run)
