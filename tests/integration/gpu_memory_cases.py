# SPDX-License-Identifier: Apache-2.0
"""The cases of three other programs with weights, gradients and optimizer state in device memory.

On a GPU this is the real thing. On the CPU accelerator ordinary memory stands in for the device's, and the update team
for the GPU kernel; all else is what runs on a GPU: the plan, the moves, what leaves when memory gets short, saving. A
case may say by ``"device_memory"`` how much there is, by ``"copy_rate"`` how slow copies are taken to be, by
``"delay_s"`` how much longer each chunk takes that is updated behind a pass, by ``"moves"`` that places change at
random after steps, and by ``"peak"`` that memory is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import checkpoint_cases
import deepspeed
import torch
import training
import user_api_cases
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from peak_sampling import HostPeak

import tencache_ds
from tencache_ds.errors import MemoryLimitError
from tencache_ds.integration import stage3_building
from tencache_ds.integration.reporting import residency
from tencache_ds.placement import step_observer
from tencache_ds.placement.places import GpuUsage, Place
from tencache_ds.planning.adam_scalars import AdamScalars, DescentScalars
from tencache_ds.profiling.waits import FetchRecorder, FetchWait
from tencache_ds.runtime import session, state_building
from tencache_ds.tiers.device_update import Launch, Run
from tencache_ds.tiers.fused_adam import TYPES, FusedAdam
from tencache_ds.tiers.update import ChunkedUpdate
from tests.tiers.ordinary_device import OrdinaryDevice

plain_config = training.config_for
AMPLE_NBYTES = 4 * 2**30
CAPACITY: dict[str, float] = {"nbytes": AMPLE_NBYTES, "copy_rate": 1e10}
"""Size of the ordinary memory that stands in for a device's, and rate of copies to it."""

NOT_FOR_STOCK = {"tencache", "capacity", "copy_rate", "device_memory", "moves", "places", "shrinks_at",
                 "host_available", "nvme_free", "host_runs_out_at", "beside_zero_init", "takes_back",
                 "hands_back", "delay_s"}  # fmt: skip
plain_finish = ChunkedUpdate._finish
delays_s: Sequence[float] = (0.0,)
"""How much longer chunks take that are updated behind a pass: each one of these, at random."""

n_behind = 0
"""Chunks that were updated behind a pass, in the case at hand."""

stock_results: dict[str, dict[str, Any]] = {}
"""Many cases differ in these keys only."""

LEFT_BY_TRAINING_NBYTES = 256 * 2**20
"""On a GPU, by a training that wants nearly all of it."""


def config_for(case: dict[str, Any], engine: str, nvme: str) -> dict[str, Any]:
    config = plain_config(case, engine, nvme)
    if engine == "tencache" and "device_memory" in case:
        config["tencache"]["gpu_memory"] = case["device_memory"]
    return config


DEVICES: list[weakref.ref[OrdinaryMemory]] = []
"""All that there were."""


def given_nbytes() -> int:
    """Ordinary memory that stands in for a device's. Any thread."""
    return sum(device.given_nbytes for reference in DEVICES if (device := reference()) is not None)


class OrdinaryMemory(OrdinaryDevice):
    """A device's memory, for want of a device."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        DEVICES.append(weakref.ref(self))
        self.wanted_by_training_nbytes = 0

    def usage(self) -> GpuUsage:
        return GpuUsage(self._free_nbytes(), 0, 2**20, 2**20)

    def copy_rate(self) -> float:
        return CAPACITY["copy_rate"]

    def _free_nbytes(self) -> int:
        self._given = [reference for reference in self._given if reference() is not None]
        return max(CAPACITY["nbytes"] - self.given_nbytes - self.wanted_by_training_nbytes, 0)

    @property
    def given_nbytes(self) -> int:
        """Bytes that are in use. Any thread."""
        return sum(storage.nbytes() for reference in self._given if (storage := reference()) is not None)

    def allocated_nbytes(self) -> int:
        return 2**20

    def _storages(self) -> set[int]:
        return {storage.data_ptr() for reference in self._given if (storage := reference()) is not None}

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._free_nbytes():
            raise MemoryLimitError(f"{nbytes} bytes are not there")
        # Poisoned: reading before writing gives wrong results.
        memory = torch.full((nbytes,), 0xCB, dtype=torch.uint8)
        self._given.append(weakref.ref(memory.untyped_storage()))
        return memory


def slow_finish(self: ChunkedUpdate, *args: Any) -> None:
    """A reader that does not wait for a weight that is updated behind a pass gets a wrong one."""
    global n_behind
    if threading.current_thread().name.startswith("tencache-update"):
        n_behind += 1
        time.sleep(random.choice(delays_s))
    plain_finish(self, *args)


class TeamAdam:
    """The update team in place of a GPU."""

    def __init__(self, fused: FusedAdam) -> None:
        self._fused = fused
        self.launches = 0

    def prepare(self, runs: Sequence[Run], gradient: torch.dtype, weight: torch.dtype) -> Launch:
        tuples = [dataclasses.astuple(run)[:6] for run in runs]
        n_tail = sum(run.n_tail for run in runs)
        # The team takes them from the end of all runs: there they are.
        in_tail = [run for run in runs if run.n_tail]
        assert in_tail == runs[len(runs) - len(in_tail) :]
        assert all(run.n_tail == run.numel for run in in_tail[1:])
        team, op = self._fused._team, self._fused._op

        def launch(scalars: AdamScalars | DescentScalars) -> None:
            self.launches += 1
            types = TYPES[gradient], TYPES[weight]
            if isinstance(scalars, DescentScalars):
                assert not any(run.exp_avg or run.exp_avg_sq for run in runs)
                masters = [(run[0], run[0], run[0], *run[3:]) for run in tuples]  # it wants addresses
                job = team.descent(masters, *types, op.DescentScalars(**dataclasses.asdict(scalars)), "")
            else:
                job = team.adam(tuples, *types, n_tail, op.AdamScalars(**dataclasses.asdict(scalars)))
            assert job.wait(60)

        return launch


def use_ordinary_memory() -> None:
    stage3_building.open_device = lambda on_cuda, fused: (OrdinaryMemory(), TeamAdam(fused))
    stage3_building.open_usage = lambda: OrdinaryMemory().usage


class RandomMoves:
    """Gives chunks other places after every second step, which a plan would not do."""

    def __init__(self, seed: int, places: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._places = [Place[name] for name in places]
        self.moved = 0

    def __call__(self, engine: Any, step: int) -> None:
        homes = engine.optimizer._gpu_homes
        if step % 2 or homes is None:
            return
        tier = engine.optimizer._state
        for index in range(len(engine.optimizer.fp16_groups)):
            wanted = [self._random.choice(self._places) for _ in tier.chunks(index)]
            self.moved += sum(new is not old for new, old in zip(wanted, tier.places(index), strict=True))
            homes._moves.relocate({index: wanted})


@contextlib.contextmanager
def little_room(case: dict[str, Any]) -> Iterator[None]:
    """What a case says is left of host memory and of the drives."""
    with contextlib.ExitStack() as stack:
        if "host_available" in case:
            for module in (session, state_building):
                stack.enter_context(mock.patch.object(module, "available_nbytes", return_value=case["host_available"]))
            stack.enter_context(
                mock.patch.object(state_building, "_free_together", return_value=case.get("nvme_free", 0))
            )
        yield


def run(case: dict[str, Any], engine: str, folder: str, rank: int) -> dict[str, Any]:
    global delays_s, n_behind
    delays_s, n_behind = (case.get("delay_s", 0.0),), 0
    if engine == "stock" and not {"scenario", "action", "gathered"} & case.keys():
        stocks_own = {key: value for key, value in case.items() if key not in NOT_FOR_STOCK}
        key = json.dumps(stocks_own, sort_keys=True)
        if key not in stock_results:
            stock_results[key] = training.run_case(stocks_own, engine, folder, rank)
        return stock_results[key]
    CAPACITY.update(nbytes=case.get("capacity", AMPLE_NBYTES), copy_rate=case.get("copy_rate", 1e10))
    if "scenario" in case:
        return user_api_cases.run(case, engine, folder, rank)
    if "action" in case:
        return checkpoint_cases.run(case, engine, folder, rank)
    hook: Any = None
    if "gathered" in case:
        hook = Gathered()
    if engine == "tencache" and "moves" in case:
        hook = RandomMoves(case["moves"], case["places"])
    if engine == "tencache" and "takes_back" in case:
        hook = TakingBack(case["takes_back"])
    if engine == "tencache" and "hands_back" in case:
        hook = HandingBack(case["hands_back"])
    if engine == "tencache" and ("shrinks_at" in case or "host_available" in case):
        hook = Shrinking(case.get("shrinks_at"))
    if engine == "tencache" and "host_runs_out_at" in case:
        hook = FullHost(case["host_runs_out_at"])
    followed = Followed(hook, beside_zero_init="beside_zero_init" in case, behind="delay_s" in case)
    RememberedRecorder.waits_of_last = []
    peak = HostPeak(given_nbytes)
    with little_room(case), peak if "peak" in case else contextlib.nullcontext():
        result = training.run_case(case, engine, folder, rank, hook=followed if engine == "tencache" else hook)
    if engine == "tencache":
        result["modules_without_hooks"] = followed.modules_without_hooks
        result["measured"] = followed.measured
        result["residency"] = followed.residency
        result["shown"] = followed.shown
        result["n_behind"] = [*followed.n_behind, n_behind]
        result["waits"] = [dataclasses.asdict(wait) for wait in RememberedRecorder.waits_of_last]
    if "peak" in case:
        result["host_peak_nbytes"], result["device_peak_nbytes"] = peak.nbytes, peak.device_peak_nbytes
    if isinstance(hook, Gathered):
        result["most_gathered"] = hook.most
    if isinstance(hook, RandomMoves):
        result["moved"] = hook.moved
    if isinstance(hook, TakingBack):
        hook.close()
        result["taken_nbytes"] = hook.taken_nbytes
    if isinstance(hook, HandingBack):
        result["handed_back_nbytes"], result["left_nbytes"] = hook.nbytes, hook.left_nbytes
    if isinstance(hook, FullHost):
        result["resident_nbytes"] = hook.resident_nbytes
    if isinstance(hook, Shrinking):
        result["device_nbytes"] = hook.device_nbytes
    return result


def finish_beside_zero_init(engine: Any) -> None:
    """Has a step end while another model is being built. ``zero.Init`` replaces torch's constructors in the whole
    process: tensors lie on its device, and those of floating point have its dtype, whoever creates them."""
    building = deepspeed.zero.Init(dtype=torch.float16)
    if get_accelerator().is_synchronized_device():
        building.local_device = torch.device("meta")  # without a GPU there is no other device with memory
    with building:
        engine.optimizer.tencache.background.finish()


def n_shown(engine: Any) -> int:
    """How many weights ``state_dict()`` shows during an update; -1 if one has not its new value."""
    shown = {name: value.clone() for name, value in engine.module.state_dict().items() if value.numel()}
    engine.optimizer.tencache.background.finish()
    weights = dict(engine.module.named_parameters(remove_duplicate=False))
    return len(shown) if all(torch.equal(weights[name].data, value) for name, value in shown.items()) else -1


class RememberedRecorder(FetchRecorder):
    """Recorder of which the last one made tells what it has recorded."""

    waits_of_last: ClassVar[list[FetchWait]] = []

    def waits(self) -> dict[int, FetchWait]:
        waits = super().waits()
        type(self).waits_of_last = list(waits.values())
        return waits


class Followed:
    """Looks at an engine after each step, and calls a hook of the case.

    Args:
        hook: of the case.
        beside_zero_init: whether each step ends while another model is being built.
        behind: whether weights are looked at while they are being updated.
    """

    def __init__(self, hook: Any, *, beside_zero_init: bool, behind: bool) -> None:
        self._hook = hook
        self._beside_zero_init = beside_zero_init
        self._behind = behind
        self.shown: list[int] = []
        """After every second step: how many weights ``state_dict()`` has shown with their new values; -1: not all."""
        self.n_behind: list[int] = []
        """After each step: how many chunks were updated behind a pass so far."""
        self.measured = False
        """Whether activations were moved in order to measure what that costs."""
        self.residency: dict[str, list[int]] = {}
        """After the last step: the bytes of each kind by place, summed over the weights."""
        self.modules_without_hooks: list[int] = []
        """After each step: how many run without DeepSpeed's hooks."""

    def __call__(self, engine: Any, step: int) -> None:
        self.n_behind.append(n_behind)
        if self._behind and step % 2:
            self.shown.append(n_shown(engine))
        if self._beside_zero_init:
            finish_beside_zero_init(engine)
        if self._hook is not None:
            self._hook(engine, step)
        competing = engine.optimizer.tencache.competing_activations
        self.measured = self.measured or (competing is not None and competing.auto.waits is not None)
        by_weight = residency(engine.module, engine.optimizer).values()
        for kind in ("weights", "gradients", "optimizer state"):
            self.residency[kind] = [sum(places) for places in zip(*(each[kind] for each in by_weight), strict=True)]
        suspended = getattr(engine.optimizer, "_suspended", None)
        self.modules_without_hooks.append(0 if suspended is None else len(suspended.modules))


class TakingBack:
    """At any time an allocation of training takes state's memory back, and after every second step all state goes there
    again. On a GPU between passes only, where it is no matter of luck.

    Args:
        seed: of the moments and the amounts.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ends = threading.Event()
        self.taken_nbytes = 0

    def __call__(self, engine: Any, step: int) -> None:
        homes, tier = engine.optimizer._gpu_homes, engine.optimizer._state
        memory = homes._memory
        if step == 0 and isinstance(memory, OrdinaryMemory):
            threading.Thread(target=self._take, args=(memory,), daemon=True).start()
        if step % 2 == 0:
            homes._moves.relocate(
                {index: (Place.GPU,) * len(tier.chunks(index)) for index in range(homes._n_sub_groups)}
            )
        elif not isinstance(memory, OrdinaryMemory):
            memory._lent.take_back(memory.usage().available_nbytes + self._random.randrange(2**20))
        self.taken_nbytes = memory.taken_nbytes

    def _take(self, memory: OrdinaryMemory) -> None:
        while not self._ends.wait(self._random.uniform(0.0, 0.02)):
            memory.take_back(self._random.choice((1, 1, 2, 100)))

    def close(self) -> None:
        self._ends.set()


class HandingBack:
    """After most steps GPU memory is handed back on request, by each way of asking for it, and taken again at once or
    steps later.

    Args:
        seed: of the choices, the same on every rank.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.nbytes = self.left_nbytes = 0
        """That have left, and that were there all the same after everything was to leave."""

    def __call__(self, engine: Any, step: int) -> None:
        moves = engine.optimizer.gpu_homes._moves
        before = moves.nbytes
        match self._random.choice(("everything", "block", "state", "weights", "again", "nothing")):
            case "everything":
                engine.offload_states()
                self.left_nbytes += moves.nbytes
                self.nbytes += before
                self._look_at_buckets(engine)
                if step % 2:
                    engine.reload_states()
            case "block":
                with tencache_ds.release_gpu_memory(engine) as released:
                    self.left_nbytes += moves.nbytes
                self.nbytes += released.nbytes
            case "state":
                engine.offload_states(include={OffloadStateTypeEnum.optim_states})
                self.left_nbytes += moves.state_nbytes
            case "weights":
                engine.offload_states(include={OffloadStateTypeEnum.lp_params})
                self.left_nbytes += moves.weight_nbytes
            case "again":
                engine.reload_states()

    @staticmethod
    def _look_at_buckets(engine: Any) -> None:
        if engine.optimizer.contiguous_gradients and hasattr(engine.optimizer, "ipg_buckets"):
            assert all(bucket.buffer is None for bucket in engine.optimizer.ipg_buckets.values())


class Gathered:
    """Counts the elements of weights that are gathered at a time."""

    def __init__(self) -> None:
        self.most: list[int] = []
        """For each step but the first, the most within it; weights that stay gathered do not count."""

    def __call__(self, engine: Any, step: int) -> None:
        if step == 0:
            coordinator = engine.optimizer._get_param_coordinator()
            fetch = coordinator.fetch_sub_module

            def counted(module: Any, forward: bool) -> None:
                fetch(module, forward)
                gathered = (p for p in engine.module.parameters() if p.ds_status.name == "AVAILABLE")
                self.most[-1] = max(self.most[-1], sum(p.ds_numel for p in gathered if not p.ds_persist))

            coordinator.fetch_sub_module = counted
        self.most.append(0)


class FullHost:
    """From some step on the machine has hardly any memory left; five steps later it has again."""

    def __init__(self, step: int) -> None:
        self._steps = (step, step + 5)
        self.resident_nbytes: list[int] = []
        """Bytes of optimizer state after each step."""

    def __call__(self, engine: Any, step: int) -> None:
        homes = engine.optimizer._host_homes
        available = 0 if self._steps[0] <= step < self._steps[1] else 2**50
        homes._available_nbytes = lambda: available
        homes._t_looked_s = homes._t_looked_at_step_s = float("-inf")
        homes._watch._patience._needed = 3
        self.resident_nbytes.append(engine.optimizer._state.resident_nbytes)


class Shrinking:
    """From some step on, if any, training wants nearly all of the device's memory for itself."""

    def __init__(self, step: int | None) -> None:
        self._step = step
        self._taken: torch.Tensor | None = None
        self.device_nbytes: list[list[int]] = []
        """After each step, of weights and of state."""

    def __call__(self, engine: Any, step: int) -> None:
        homes = engine.optimizer._gpu_homes
        self.device_nbytes.append([homes._moves.weight_nbytes, engine.optimizer._state.device_nbytes])
        if step == self._step:
            if isinstance(homes._memory, OrdinaryMemory):
                homes._memory.wanted_by_training_nbytes = CAPACITY["nbytes"]
            else:
                # Other processes on the card may have left less than that.
                nbytes = max(homes._memory.usage().free_nbytes - LEFT_BY_TRAINING_NBYTES, 0)
                self._taken = torch.empty(nbytes, dtype=torch.uint8, device=homes._memory.device)


def prepare() -> None:
    """Makes this process one whose engines have GPU memory, or what stands in for it."""
    training.config_for = config_for
    # Small models have several buffers of gradients too.
    stage3_building.GRADIENT_BUFFER_NUMEL = 2**14
    # At the same step in every run, however fast the machine's steps are.
    step_observer.MOST_STEPS = 1
    ChunkedUpdate._finish = slow_finish
    if get_accelerator().is_synchronized_device():
        use_ordinary_memory()


if __name__ == "__main__":
    prepare()
    torch.manual_seed(0)
    step_observer.FetchRecorder = RememberedRecorder
    training.main(run)
