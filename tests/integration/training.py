# SPDX-License-Identifier: Apache-2.0
"""Trains small models with DeepSpeed and reports every loss: the harness behind the exactness tests.

Runs as a program, once per rank, on a list of cases; so a case is real training in a real process, with one start-up of
DeepSpeed for many cases. The oracle is stock CPU offload with two corrections: its gradient buffers are zeroed after
each step, because stock ZeRO-3 re-applies the previous step's gradient to weights that get none; and under gradient
accumulation it is given the gradients of weights that only an earlier micro-step used, which it forgets. Of a resumed
run the oracle is the run that never stopped: a checkpoint of stock's does not have the powers of Adam's betas.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import hashlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import torch
from models import MODELS, Experts
from oracle import KeptResults, circumstances
from torch import nn

# Configs


def config_for(case: dict[str, Any], engine: str, nvme: str) -> dict[str, Any]:
    """The DeepSpeed config of a case for "stock" (CPU offload), "stock_nvme" or "tencache" (NVMe)."""
    nvme = case.get("nvme_path", nvme)
    device = "cpu" if engine == "stock" else "nvme"
    section = {"device": device, "pin_memory": True} | ({"nvme_path": nvme} if device == "nvme" else {})
    zero = {
        "stage": 3,
        "offload_param": dict(section),
        "offload_optimizer": dict(section),
        "sub_group_size": case.get("sub_group_size", 300_000),
        "stage3_max_live_parameters": case.get("max_live", 1_000_000),
        "stage3_prefetch_bucket_size": case.get("prefetch", 300_000),
        "stage3_max_reuse_distance": case.get("reuse", 0),
        "stage3_param_persistence_threshold": case.get("persistence", 1000),
        "reduce_bucket_size": case.get("reduce_bucket", 500_000),
    } | case.get("zero", {})
    if "offload_param" in case:
        zero["offload_param"] = section | {"device": case["offload_param"] if device == "nvme" else "cpu"}
        if case["offload_param"] == "none":
            del zero["offload_param"]
    if case.get("offload_optimizer") == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    elif case.get("offload_optimizer") == "none":
        del zero["offload_optimizer"]
    if engine == "stock_nvme":
        buffers = {"buffer_count": case.get("buffer_count", 5), "buffer_size": case.get("buffer_size", 600_000)}
        zero["offload_param"] |= {"max_in_cpu": 0} | buffers
    precision = case.get("precision", "bf16")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": case.get("clipping", 0.0),
        "steps_per_print": 10**9,
    }
    if "optimizer" not in case:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": case.get("weight_decay", 0.01)}}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": case.get("scale_power", 8), "loss_scale_window": 5,
                          "hysteresis": 1}  # fmt: skip
    if case.get("muon"):
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1, "adam_lr": 1e-3}}
        zero["reduce_scatter"] = False  # which DeepSpeed asks for
    if case.get("scheduler"):
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-3}}
    if "grad_accum_dtype" in case:
        config["data_types"] = {"grad_accum_dtype": case["grad_accum_dtype"]}
    config |= case.get("config", {})
    if engine == "tencache":
        config["offload_engine"] = "tencache"
        config["tencache"] = {"host_memory": 0, "chunk_size": 2**18, "poison_buffers": True, "split_master": True}
        config["tencache"] |= case.get("tencache", {})
        if case.get("by_name"):  # which stock does not know
            config["optimizer"] = {"type": case["by_name"], "params": case.get("optimizer_params", {})}
        if "TENCACHE_FAULTS" in os.environ:
            config["tencache"]["allow_faults"] = True
    return config


def optimizer_for(case: dict[str, Any], model: nn.Module) -> Any:
    """The client optimizer a case names, or None for the config's AdamW."""
    name = case.get("optimizer")
    params = [p for p in model.parameters() if p.requires_grad]
    if name is None:
        return None
    if name == "two_groups":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        split = len(params) // 2
        groups = [{"params": params[:split], "lr": 1e-3, "betas": (0.9, 0.95)},
                  {"params": params[split:], "lr": 2e-3, "weight_decay": 0.1}]  # fmt: skip
        return DeepSpeedCPUAdam(groups, lr=1e-3)
    if name == "groups_backwards":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        split = len(params) // 2
        return DeepSpeedCPUAdam([{"params": params[split:]}, {"params": params[:split]}], lr=1e-3)
    if name == "torch_groups":
        split = len(params) // 2
        groups = [{"params": params[:split], "betas": (0.9, 0.95), "amsgrad": True},
                  {"params": params[split:], "eps": 1e-6, "weight_decay": 0.1}]  # fmt: skip
        return torch.optim.AdamW(groups, lr=1e-3)
    if name == "lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(params, lr=1e-4)
    if name == "cpu_adagrad":
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(params, lr=1e-2)
    if name == "torch_adamw":
        return torch.optim.AdamW(params, lr=1e-3)
    if name == "torch_sgd":
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    if name == "fusedadam":
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(params, lr=1e-3)
    if name == "odd_states":
        return OddStates(params, lr=1e-1)
    if name.startswith("bitsandbytes.optim."):
        import bitsandbytes

        return getattr(bitsandbytes.optim, name.rpartition(".")[2])(params, **case.get("optimizer_params", {}))
    if name.startswith("torch.optim."):
        return getattr(torch.optim, name.rpartition(".")[2])(params, **case.get("optimizer_params", {}))
    raise ValueError(f"unknown optimizer {name!r}")


class OddStates(torch.optim.Optimizer):
    """Keeps states of every shape that an optimizer may come up with, and makes one of them late.

    Each is used, and each is a new tensor after every step; a checkpoint turns floating-point and integer states into
    the parameters' dtype.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                count = state["count"] = state.get("count", torch.zeros((), dtype=torch.int64)) + 1
                mean = state.get("mean", torch.zeros_like(p, dtype=torch.bfloat16)).float() * 0.9 + p.grad * 0.1
                state["mean"] = mean.to(torch.bfloat16)
                state["sign"] = (torch.sign(mean) + state.get("sign", 0)).clamp(-2, 2).to(torch.int8)
                state["row"] = mean.view(1, -1) + state.get("row", 0)
                state["norms"] = [*state.get("norms", []), float(mean.norm())][-3:]
                if count > 3:
                    state["late"] = state.get("late", torch.zeros_like(p)) + mean * mean
                update = mean + 1e-3 * state["sign"].float() + 1e-2 * state["row"].view(-1) + state.get("late", 0)
                p.sub_(update * group["lr"] / (1 + sum(state["norms"])))


# Running


def build(case: dict[str, Any], engine: str, nvme: str, edit: Callable[[nn.Module], None] | None = None) -> Any:
    """Model and DeepSpeed engine of a case; ``edit`` may change the model's weights before DeepSpeed is initialized."""
    import deepspeed

    config = config_for(case, engine, nvme)
    architectures.import_code_of(case["model"])
    if hasattr(torch.compiler, "set_stance"):
        # Compiled, Muon has other kernels for the shape that it gets first than for later ones, and a rank gets other
        # shapes with offload than without: on two ranks stock's losses then differ from each other.
        torch.compiler.set_stance("force_eager" if case.get("muon") else "default")
    torch.manual_seed(case.get("seed", 7))
    if case.get("zero_init", True):
        with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)):
            model = MODELS[case["model"]]()
    else:
        model = MODELS[case["model"]]()
    if edit is not None:
        edit(model)
    if case.get("lora"):
        model.add_lora(case.get("lora_rank", 8))
    if case["model"] == "moe_leaf":
        deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    optimizer = optimizer_for(case, model) if "optimizer" not in config else None
    parameters = None if optimizer is not None else [p for p in model.parameters() if p.requires_grad]
    built = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)[0]
    if case.get("compiled"):
        built.compile(backend="eager")
    return built


def initialize(case: dict[str, Any], model: nn.Module, nvme: str) -> Any:
    """Another TenCache engine for a model whose first one was destroyed."""
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config_for(case, "tencache", nvme))[0]


def zero_gradients(engine: Any) -> None:
    """Gives stock CPU offload the gradient of zero that a weight without a gradient should have."""
    optimizer = engine.optimizer
    optimizer.grad_partitions_flat_buffer.zero_()
    for partition in optimizer.fp32_partitioned_groups_flat:
        if partition.grad is not None:
            partition.grad.zero_()


def complete_gradients(engine: Any) -> None:
    """Gives stock CPU offload the gradients it forgets: those of weights that only an earlier micro-step used.

    DeepSpeed has no function for it before 0.19.5: the oracle is right there if every micro-step uses every weight.
    """
    if hasattr(engine.optimizer, "_finalize_offload_gradient_accumulation"):
        engine.optimizer._finalize_offload_gradient_accumulation()


def train(engine: Any, steps: int, generator: torch.Generator, *, oracle: bool, hook: Any = None) -> list[str]:
    """Losses of ``steps`` optimizer steps, as exact hexadecimal floats (one per micro-step)."""
    losses = []
    for step in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            batch = [t.to(engine.device) for t in engine.module.batch(generator)]
            loss = engine(*batch)
            losses.append(float(loss.detach().float().item()).hex())
            engine.backward(loss)
            if oracle and engine.gradient_accumulation_steps() > 1 and engine.is_gradient_accumulation_boundary():
                complete_gradients(engine)
            engine.step()
        if oracle:
            zero_gradients(engine)
        if hook is not None:
            hook(engine, step)
    return losses


def digest(value: torch.Tensor) -> str:
    """A hash of a tensor's bytes."""
    return hashlib.sha256(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(model: nn.Module) -> dict[str, str]:
    """A hash of every weight's value. Collective."""
    import deepspeed

    by_name = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            by_name[name] = digest(param.data)
    return by_name


def smallest_staging_nbytes(case: dict[str, Any], nvme: str) -> int:
    """What the error for far too little ``staging_memory`` names as the least that works."""
    try:
        build(case | {"tencache": case.get("tencache", {}) | {"staging_memory": 1}}, "tencache", nvme)
    except ValueError as error:
        match = re.search(r"needs at least (\d+)", str(error))
        if match is None:
            raise
        return int(match.group(1))
    raise RuntimeError("one byte of staging memory was accepted")


def scratch_engines(folder: str) -> list[str]:
    """Those whose scratch files below a folder this process has open: path and number; the files have no names."""
    engines = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if link.startswith(f"{os.path.abspath(folder)}/") and "/tencache-engine-" in link:
                engines.add(link.split("-rank")[0])
    return sorted(engines)


def wait_until_closed() -> None:
    """Until models that nothing refers to any more have taken their files and threads along."""
    for _ in range(2):  # what the first one finds may still be held by what it ends
        gc.collect()
    t_end = time.monotonic() + 10
    while any(thread.name == "tencache-close" for thread in threading.enumerate()) and time.monotonic() < t_end:
        time.sleep(0.02)


def drain(engine: Any) -> None:
    """Waits until everything that TenCache has written is on NVMe."""
    for part in engine.optimizer.tencache.all():
        part.weights.drain()
    engine.optimizer.tencache.optimizer_state.drain()


class TrafficMeter:
    """NVMe traffic between two optimizer steps: TenCache's count beside the kernel's for this process."""

    def __init__(self, first: int, last: int) -> None:
        self._steps = (first, last)
        self._seen: list[tuple[int, int]] = []

    def __call__(self, engine: Any, step: int) -> None:
        if step + 1 not in self._steps:
            return
        import tencache_ds

        drain(engine)
        time.sleep(0.3)  # reads ahead of the next step are counted when asked for: let the kernel see them too
        moved = tencache_ds.stats(engine).total.nbytes
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        self._seen.append(
            (moved["nvme_read"] + moved["nvme_write"], int(lines["read_bytes"]) + int(lines["write_bytes"]))
        )

    def result(self) -> dict[str, int]:
        """Bytes over the steps between."""
        (counted, kernel), (counted_end, kernel_end) = self._seen
        steps = self._steps[1] - self._steps[0]
        return {"steps": steps, "counted_nbytes": counted_end - counted, "kernel_nbytes": kernel_end - kernel}


def traced_functions(package: str) -> list[str]:
    """Functions of a package that the compiler has traced, of those that are alive."""
    import gc
    import types

    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    functions = [value for value in gc.get_objects() if type(value) is types.FunctionType]
    codes = {function.__code__ for function in functions if (function.__module__ or "").split(".")[0] == package}
    return sorted({code.co_name for code in codes if _debug_get_cache_entry_list(code)})


def run_case(case: dict[str, Any], engine_name: str, folder: str, rank: int, hook: Any = None) -> dict[str, Any]:
    """One training run: its losses and, with TenCache, its counters. ``hook(engine, step)`` follows each step."""
    nvme = os.path.join(folder, "nvme")
    if case.get("smallest_staging") and engine_name == "tencache":
        smallest = smallest_staging_nbytes(case, nvme)
        case = case | {"tencache": case.get("tencache", {}) | {"staging_memory": smallest}}
    engine = build(case, engine_name, nvme)
    generator = torch.Generator().manual_seed(1000 + rank)
    steps = case.get("steps", 20)
    meter = TrafficMeter(2, steps) if case.get("measure_traffic") and engine_name == "tencache" else None
    result: dict[str, Any] = {"initial_weights": digests(engine.module) if case.get("weights") else {}}
    result["losses"] = train(engine, steps, generator, oracle=engine_name == "stock", hook=meter or hook)
    if engine_name == "tencache":
        import dataclasses

        import tencache_ds

        result["stats"] = dataclasses.asdict(tencache_ds.stats(engine))
        result["class"] = type(engine.optimizer).__name__
        chunked = getattr(engine.optimizer, "_chunked_step", None)
        result["hidden_share"] = 0.0 if chunked is None else chunked.hidden_share()
        result["numel"] = sum(int(n) for n in engine.optimizer.fp16_partitioned_groups_flat_numel)
        if meter is not None:
            result["traffic"] = meter.result()
        if case.get("compiled"):
            result["traced"] = traced_functions("tencache_ds")
    if case.get("weights"):
        result["weights"] = digests(engine.module)
    engine.destroy()
    return result


def writes_no_files(case: dict[str, Any]) -> bool:
    """Whether nothing but its result is left of a case with stock."""
    return "action" not in case


def main(
    run: Callable[[dict[str, Any], str, str, int], dict[str, Any]] = run_case,
    keeps: Callable[[dict[str, Any]], bool] = writes_no_files,
) -> None:
    """Runs the cases of ``--cases`` with ``run(case, engine, folder, rank)`` and writes ``results_<rank>.json``.

    Stock's of which ``keeps(case)`` is true run first, before there is a TenCache engine in the process; with
    ``--oracle``, only those of which no result is kept there.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--cases", required=True, help="JSON file: list of [name, case, engine]")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--oracle", help="folder for results of stock that are kept")
    arguments = parser.parse_args()
    import cpuinfo
    import deepspeed

    # DeepSpeed's CPU Adam asks for the processor's name each time it is created: one second in a separate process.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    deepspeed.init_distributed()
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    cases = json.loads(Path(arguments.cases).read_text())
    of_stock = [(name, case) for name, case, engine in cases if engine == "stock" and keeps(case)]
    kept: KeptResults | None = None
    results: dict[str, Any] = {}
    if arguments.oracle and of_stock:
        on = circumstances(os.environ)
        kept = KeptResults(Path(arguments.oracle), Path(sys.argv[0]).stem, (rank, ranks), on)
        found = {f"{name}/stock": kept.find(name, case) for name, case in of_stock}
        results = {key: found[key] for key in found_by_all(found)}
        print(f"[rank {rank}] kept results of stock: {len(results)} of {len(of_stock)}", flush=True)
    ordered = [(name, case, "stock") for name, case in of_stock]
    ordered += [case for case in map(tuple, cases) if case not in ordered]
    for name, case, engine in ordered:
        key = f"{name}/{engine}"
        if key in results:
            continue
        t_start = time.perf_counter()
        try:
            results[key] = run(copy.deepcopy(case), engine, arguments.folder, rank)
        except Exception as error:  # reported to the test, which fails with it
            trace = traceback.format_exc()
            print(trace, flush=True)
            results[key] = {"error": f"{type(error).__name__}: {error}", "traceback": trace}
        else:
            if kept is not None and engine == "stock" and keeps(case):
                kept.keep(name, case, results[key])
        seconds = time.perf_counter() - t_start
        print(f"[rank {rank}] {key}: {results[key].get('error', 'done')} ({seconds:.1f} s)", flush=True)
        Path(arguments.folder, f"results_{rank}.json").write_text(json.dumps(results))
        if "error" in results[key] and ranks > 1:
            break  # the ranks are no longer together
    Path(arguments.folder, f"results_{rank}.json").write_text(json.dumps(results))
    if any("error" in result for result in results.values()):
        sys.exit(1)


def found_by_all(found: dict[str, Any]) -> list[str]:
    """What no rank has to do again. Collective."""
    from deepspeed.accelerator import get_accelerator

    if torch.distributed.get_world_size() == 1:
        return [key for key, value in found.items() if value is not None]
    device = get_accelerator().current_device_name()
    by_all = torch.tensor([value is not None for value in found.values()], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(by_all, torch.distributed.ReduceOp.MIN)
    return [key for key, everywhere in zip(found, by_all.tolist(), strict=True) if everywhere]


if __name__ == "__main__":
    main()
