# SPDX-License-Identifier: Apache-2.0
"""The quick fetch leaves DeepSpeed's account of weights as DeepSpeed's own fetch does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry, PartitionedParameterCoordinator
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.host_path import HostPath, QuickCoordinator
from tencache_ds.integration.hooked_modules import params_of

pytestmark = pytest.mark.timeout(200)

_PRIVATE = "_PartitionedParameterCoordinator__"


class Handle:
    """Handle of weights that are gathered together: the first call of :meth:`wait` is for all of them."""

    def __init__(self, params: list[Any], log: list[Any]) -> None:
        self.params, self.log, self.is_over = params, log, False

    def wait(self, **_: Any) -> None:
        if not self.is_over:
            self.is_over = True
            self.log.append(("wait", [param.ds_id for param in self.params]))
            for param in self.params:
                param.ds_status = ZeroParamStatus.AVAILABLE


class Model:
    """Modules that are called in an order, with DeepSpeed's coordinator, or with ours where there is a host path."""

    def __init__(self, host_path: HostPath | None, sizes: list[list[int]], **limits: int) -> None:
        self.log: list[Any] = []
        self.n_quick = 0
        self.modules = []
        self.params: list[Any] = []
        for key, numels in enumerate(sizes):
            module = torch.nn.Module()
            module.ds_id, module._external_params, module.ds_recompute_parameters = key, {}, set()
            module.ds_external_parameters = lambda: ()
            for index, numel in enumerate(numels):
                setattr(module, f"weight{index}", self.make_param(numel))
            self.modules.append(module)
        stream = None if get_accelerator().is_synchronized_device() else get_accelerator().Stream()
        self.coordinator = (PartitionedParameterCoordinator if host_path is None else QuickCoordinator)(
            limits["bucket"], limits["reuse"], limits["live"], stream, InflightParamRegistry(), prefetch_nvme=False,
            **({} if host_path is None else {"host_path": host_path}),
        )  # fmt: skip

    def make_param(self, numel: int) -> Any:
        param: Any = torch.nn.Parameter(torch.empty(0))
        param.ds_id, param.ds_numel, param.ds_shape, param.ds_persist = len(self.params), numel, (numel,), False
        param.ds_status, param.is_external_param, param.ds_active_sub_modules = (
            ZeroParamStatus.NOT_AVAILABLE, False, set(),
        )  # fmt: skip
        param.ds_tensor = SimpleNamespace(final_location=None, status=None)
        param.nvme_swapper = param.ds_secondary_tensor = param.ds_zero_param_process_group = None
        param.partition_numel = lambda: numel
        param.ds_summary = lambda **_: f"param {param.ds_id}"

        def gather(params: list[Any], quantize: bool = False) -> Handle:
            params = sorted(params, key=lambda each: each.ds_id)
            self.log.append(("gather", [each.ds_id for each in params]))
            for each in params:
                each.ds_status = ZeroParamStatus.INFLIGHT
            return Handle(params, self.log)

        def partition(free_data: bool = True) -> None:
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE

        param.all_gather_coalesced, param.partition = gather, partition
        self.params.append(param)
        return param

    def fetch(self, module: Any, forward: bool) -> None:
        coordinator = self.coordinator
        coordinator.trace_prologue(module)
        if coordinator.is_record_trace():
            coordinator.record_module(module)
        if isinstance(coordinator, QuickCoordinator):
            params = params_of(module)
            with mock.patch.object(coordinator, "_fetch_what_is_there", self.counted(coordinator._fetch_what_is_there)):
                coordinator.gather_module(module, params, forward)
        else:
            coordinator.fetch_sub_module(module, forward)

    def counted(self, fetch: Any) -> Any:
        def fetch_and_count(*args: Any) -> bool:
            done = fetch(*args)
            self.n_quick += done
            return bool(done)

        return fetch_and_count

    def step(self, order: list[int]) -> list[Any]:
        """A forward pass over modules, and a backward pass; the coordinator's account after each call."""
        self.coordinator.reset_step()
        seen = []
        for places, forward in ((order, True), (order[::-1], False)):
            for place in places:
                module = self.modules[place]
                self.fetch(module, forward)
                seen.append(self.account())
                self.coordinator.release_sub_module(module, forward)
                seen.append(self.account())
        for param in self.params:  # before an update
            param.ds_active_sub_modules.clear()
        for module in self.modules:
            self.coordinator.release_and_reset_all(module)
        return seen

    def account(self) -> dict[str, Any]:
        names = ("step_id", "n_available_params", "trace_mode")
        account = {name: getattr(self.coordinator, _PRIVATE + name) for name in names}
        queue = getattr(self.coordinator, _PRIVATE + "param_queue")
        account["queue"] = [(entry.param.ds_id, entry.step_id_last_used_at) for entry in queue or ()]
        account["status"] = [(param.ds_status, sorted(param.ds_active_sub_modules)) for param in self.params]
        account["in_backward"] = list(getattr(self.coordinator, _PRIVATE + "active_backward_submodules"))
        account["log"] = list(self.log)
        in_flight = getattr(self.coordinator, _PRIVATE + "inflight_param_registry")
        account["in_flight"] = sorted(param.ds_id for param, handle in in_flight.items() if not handle.is_over)
        return account


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Any:
    with (
        mock.patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks"),
        mock.patch.object(partitioned_param_coordinator, "print_rank_0"),
    ):
        yield


QUICK = HostPath(fetches=True)
NUMELS = st.lists(st.lists(st.integers(1, 50), max_size=2), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    sizes=NUMELS,
    bucket=st.sampled_from([0, 1, 30, 60, 10**6]),
    live=st.sampled_from([1, 50, 100, 10**6]),
    reuse=st.sampled_from([0, 40, 10**6]),
    data=st.data(),
)
def test_the_account_is_deepspeeds(sizes: Any, bucket: int, live: int, reuse: int, data: st.DataObject) -> None:
    models = [Model(each, sizes, bucket=bucket, live=live, reuse=reuse) for each in (None, QUICK, HostPath())]
    order = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=10))
    another = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=10))
    for each in (order, order, order, another, order, order, order):
        stock, quick, switched_off = (model.step(each) for model in models)
        assert quick == stock
        assert switched_off == stock
    assert models[2].n_quick == 0


def test_most_fetches_are_quick_once_the_order_is_known() -> None:
    model = Model(QUICK, [[10]] * 8, bucket=40, live=10**6, reuse=10**6)
    order = list(range(8))
    model.step(order)
    assert model.n_quick == 0
    model.step(order)
    assert model.n_quick >= 12, "four fetches of a forward pass, and all of a backward pass"


def test_behind_an_update_no_more_than_a_bucket_and_a_half_is_gathered() -> None:
    model = Model(QUICK, [[10]] * 16, bucket=40, live=10**6, reuse=10**6)
    coordinator: Any = model.coordinator
    order = list(range(16))
    for _ in range(2):
        model.step(order)
    model.n_quick = 0
    coordinator.reset_step()
    coordinator.begin_fetches(behind_update=True)
    for place in order:
        model.fetch(model.modules[place], forward=True)
        gathered = [param.ds_status is not ZeroParamStatus.NOT_AVAILABLE for param in model.params]
        assert sum(gathered[place + 1 :]) * 10 <= 60
        assert gathered[place]
        coordinator.release_sub_module(model.modules[place], forward=True)
    assert 0 < model.n_quick < 16


def test_a_recomputed_module_is_left_to_deepspeed() -> None:
    model = Model(QUICK, [[10]] * 4, bucket=10**6, live=10**6, reuse=10**6)
    for _ in range(2):
        model.step([0, 1, 2, 3])
    model.coordinator.reset_step()
    for place in range(4):
        model.fetch(model.modules[place], forward=True)
    module = model.modules[0]
    with mock.patch.object(torch._C, "_current_graph_task_id", return_value=7):
        assert not model.coordinator._fetch_what_is_there(module, params_of(module), True)
        assert model.coordinator._fetch_what_is_there(module, params_of(module), False)
