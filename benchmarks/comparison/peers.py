# SPDX-License-Identifier: Apache-2.0
"""The systems compared: configuration, searched settings and requirements of each peer.

A peer is a function from its knobs to a DeepSpeed config. Settings that all share (:func:`base_config`) are not
knobs. The search starts at the first value of each knob: the best of earlier measurements (``docs/benchmarks``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tencache_ds.planning.forecast import GRADIENT_NBYTES, STATE_NBYTES, WEIGHT_NBYTES

from ..record import Placement, Workload

GIB = 2**30
NBYTES_PER_PARAM = WEIGHT_NBYTES + GRADIENT_NBYTES + STATE_NBYTES
"""Bytes that ``host_memory_share`` is a share of."""

Knobs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine and the workload, as peers need them."""

    workload: Workload  # the training
    numel: int  # parameters of the model
    largest: int  # elements of its largest parameter
    nvme_path: str  # folder for data on NVMe
    gpus: int  # GPUs that can be used; 0 on a machine with DeepSpeed's CPU accelerator
    gpu_nbytes: int  # memory of one of them that may be used
    host_nbytes: int  # host memory that may be used


@dataclass(frozen=True, slots=True)
class Peer:
    """One of the systems or modes compared."""

    name: str  # for the command line and the record
    label: str  # for tables
    configure: Callable[[Setting, Knobs], dict[str, Any]]  # DeepSpeed config from knobs
    # knobs with the values that may be tried, the starting value first. A knob with one value is fixed
    space: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    placement: Placement | None = None  # where it keeps things; None if only a run can tell
    host_nbytes_per_param: int = 0  # host memory that it needs
    gpu_nbytes_per_param: int = 0  # memory that it needs of all GPUs together
    needs_gpu: bool = False
    needs_program: str = ""  # of the system, and of the package with the same name
    semantics: str = ""  # its differences from synchronous training; empty for the same results
    program: str = "train_step"  # module of this package that trains
    launcher: tuple[str, ...] = ()  # further arguments for the ``deepspeed`` launcher
    zero_init: bool = True  # whether the model is built partitioned
    operators: tuple[str, ...] = ()  # builders of what DeepSpeed compiles for it beside what the others use

    def refuse(self, setting: Setting) -> str:
        """Why it cannot run in a setting, or an empty string."""
        if self.needs_gpu and not setting.gpus:
            return "it needs a GPU, and this machine trains on its CPU"
        gpu_nbytes = self.gpu_nbytes_per_param * setting.numel / setting.workload.ranks
        needs = {
            "GPU": (gpu_nbytes, setting.gpu_nbytes),
            "host": (self.host_nbytes_per_param * setting.numel, setting.host_nbytes),
        }
        for of, (needed, allowed) in needs.items():
            if needed > allowed:
                return f"it needs about {needed / GIB:.0f} GiB of {of} memory, {allowed / GIB:.0f} may be used"
        if self.needs_program and shutil.which(self.needs_program) is None:
            return f"it needs the {self.needs_program} command (`apt install {self.needs_program}`)"
        return ""

    def place(self, knobs: Knobs) -> Placement | None:
        """Where it keeps things: the state that is not in RAM by a ``ratio`` is on the GPU."""
        if self.placement is None or "ratio" not in knobs:
            return self.placement
        return self.placement.model_copy(update={"optimizer_gpu": 1 - knobs["ratio"]})


def base_config(setting: Setting, knobs: Knobs, **sections: Any) -> dict[str, Any]:
    """The settings that all share (precision, optimizer, clipping, batch), and those of stock's knobs.

    ``sections`` are further ones of "zero_optimization".
    """
    workload = setting.workload
    zero = {"stage": 3} | _renamed(knobs, ZERO_KEYS) | sections
    if "prefetch_share" in knobs:
        zero["stage3_prefetch_bucket_size"] = int(knobs["prefetch_share"] * setting.numel)
    # fp16 from a scale that this many steps do not lower: every configuration makes the same number of updates.
    precision = {"initial_scale_power": 12} if workload.precision == "fp16" else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        workload.precision: {"enabled": True} | precision,
    }
    if aio := _renamed(knobs, AIO_KEYS):
        config["aio"] = aio | {"single_submit": False, "overlap_events": True}
    return config


ZERO_KEYS = {
    "sub_group_size": "sub_group_size", "live": "stage3_max_live_parameters", "reuse": "stage3_max_reuse_distance"
}  # fmt: skip
AIO_KEYS = {"aio_threads": "intra_op_parallelism", "aio_queue_depth": "queue_depth", "aio_block": "block_size"}
RAM_KEYS = {"ratio": "ratio", "adam_cores": "cpuadam_cores_perc"}
"""DeepSpeed's names of knobs."""


def _renamed(knobs: Knobs, keys: Mapping[str, str]) -> dict[str, Any]:
    return {key: knobs[knob] for knob, key in keys.items() if knob in knobs}


RAM = {"device": "cpu", "pin_memory": True}


def _nvme(setting: Setting) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": setting.nvme_path, "pin_memory": True}


def _stock(setting: Setting, knobs: Knobs, weights: str = "", optimizer: str = "", **options: Any) -> dict[str, Any]:
    """ZeRO-3 with the weights and the optimizer state on "nvme", in "ram", or, by default, on the GPU.

    ``options`` are further ones of the optimizer's offload.
    """
    sections: dict[str, dict[str, Any]] = {}
    if weights == "ram":
        sections["offload_param"] = RAM
    elif weights == "nvme":
        # A swap buffer holds a whole weight, and every weight live on the device holds one: too few end the run.
        size = int(max(setting.largest, 1) * knobs["param_buffer_scale"])
        buffers = {"buffer_count": knobs["param_buffers"], "buffer_size": size, "max_in_cpu": 0}
        sections["offload_param"] = _nvme(setting) | buffers
    if optimizer == "ram":
        sections["offload_optimizer"] = RAM | _renamed(knobs, RAM_KEYS) | options
    elif optimizer == "nvme":
        pipelined = knobs["pipeline"]
        # Four tensors per sub-group; reading ahead and writing behind hold three sub-groups at a time.
        pipeline = {"buffer_count": 12 if pipelined else 4, "pipeline_read": pipelined, "pipeline_write": pipelined}
        sections["offload_optimizer"] = _nvme(setting) | pipeline
    return base_config(setting, knobs, **sections)


def _zenflow(setting: Setting, knobs: Knobs) -> dict[str, Any]:
    options = {
        "topk_ratio": knobs["topk_ratio"],
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": knobs["update_interval"],
        # ZenFlow starts its optimizer process at the first update, which takes seconds: with one round of warm-up that
        # is the first step, which is not measured, and not the fourth.
        "full_warm_up_rounds": 1,
        "overlap_step": True,
    }
    # Stage 3, though its authors show stage 2: DeepSpeed 0.19.8 permutes the weights there, because ZenFlow flattens
    # them transposed and _update_model_bit16_weights in stage_1_and_2.py takes them back as they lie.
    return base_config(setting, knobs, offload_optimizer=RAM, zenflow=options)


def _tencache(setting: Setting, knobs: Knobs, device: str = "nvme") -> dict[str, Any]:
    section = RAM if device == "cpu" else _nvme(setting)
    config = base_config(setting, {}, offload_param=section, offload_optimizer=section)
    options = {key: value for key, value in knobs.items() if key != "host_memory_share"}
    if "host_memory_share" in knobs:
        nbytes = knobs["host_memory_share"] * NBYTES_PER_PARAM * setting.numel
        options["host_memory"] = int(nbytes / setting.workload.ranks)
    return config | {"offload_engine": "tencache", "tencache": options}


AIO_SPACE: dict[str, tuple[Any, ...]] = {
    "aio_threads": (4, 8, 1, 16),
    "aio_queue_depth": (32, 8, 128),
    "aio_block": (2**20, 8 * 2**20),
}
OPTIMIZER_SPACE: dict[str, tuple[Any, ...]] = {
    "pipeline": (True, False),
    "sub_group_size": (10**8, 2 * 10**8, 5 * 10**7),
}
WEIGHT_SPACE: dict[str, tuple[Any, ...]] = {
    # With the default reuse distance of 1e9, and with a large prefetch bucket, stock runs out of buffers or assigns one
    # twice, and ends: see docs/benchmarks. The bucket is a share of the parameters: what fits one model fits another.
    "reuse": (0,),
    "prefetch_share": (0.015, 0.04, 0),
    "live": (10**9, 2 * 10**8),
    "param_buffers": (40,),
    "param_buffer_scale": (1,),
}

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("tencache", "TenCache", _tencache),
        Peer(
            "tencache-ram", "TenCache, all in RAM", partial(_tencache, device="cpu"),
            placement=Placement(), host_nbytes_per_param=20,
        ),
        Peer(
            "nvme-nvme", "stock NVMe + NVMe", partial(_stock, weights="nvme", optimizer="nvme"),
            AIO_SPACE | OPTIMIZER_SPACE | WEIGHT_SPACE, Placement(weights_nvme=1, optimizer_nvme=1),
        ),
        Peer(
            "ram-nvme", "stock RAM + NVMe", partial(_stock, weights="ram", optimizer="nvme"),
            AIO_SPACE | OPTIMIZER_SPACE | {"prefetch_share": (0.04, 0.4)}, Placement(optimizer_nvme=1),
        ),
        Peer(
            "ram-ram", "stock RAM + RAM", partial(_stock, weights="ram", optimizer="ram"),
            {"sub_group_size": (10**9, 10**8), "prefetch_share": (0.04, 0.4), "live": (10**9,)}, Placement(),
            host_nbytes_per_param=26,  # as measured (docs/benchmarks)
        ),
        Peer(
            "gpu-ram", "stock GPU + RAM", partial(_stock, optimizer="ram"), {"sub_group_size": (10**9, 10**8)},
            Placement(weights_gpu=1), host_nbytes_per_param=20, needs_gpu=True,
        ),
        Peer(
            "gpu-gpu", "stock GPU only", _stock, placement=Placement(weights_gpu=1, optimizer_gpu=1),
            gpu_nbytes_per_param=20, needs_gpu=True,  # weights, gradients, fp32 state, and buffers
            operators=("FusedAdamBuilder",),  # takes a minute with CUDA's compiler
        ),
        Peer(
            "twin-flow", "Twin-Flow", partial(_stock, optimizer="ram"),
            {"ratio": (0.5,), "sub_group_size": (10**8, 10**9)}, Placement(weights_gpu=1),
            host_nbytes_per_param=12, needs_gpu=True,
        ),
        Peer(
            "superoffload", "SuperOffload", partial(_stock, optimizer="ram", super_offload=True),
            {"ratio": (0.9,), "adam_cores": (0.8,), "sub_group_size": (10**8, 4 * 10**8)},
            Placement(weights_gpu=1), host_nbytes_per_param=20, needs_gpu=True,
            # It stalls on the cores of the trainer unless it is bound to its own (docs/benchmarks).
            needs_program="numactl", launcher=("--bind_cores_to_rank",),
        ),
        Peer(
            "zenflow", "ZenFlow", _zenflow, {"topk_ratio": (0.1,), "update_interval": (4,)}, Placement(weights_gpu=1),
            # Two of each: gradients and both moments, for the update that runs and the next one; and a copy of the
            # weights.
            host_nbytes_per_param=36, needs_gpu=True,
            semantics="most weights are updated once in 4 steps, from gradients that are up to 7 steps old",
            # ZenFlow keeps weights transposed and turns them round in each forward, but transposes them at first only
            # where they are still whole: under zero.Init the model would compute with wrong shapes.
            zero_init=False,
        ),
        Peer(
            # train_fsdp reads batch, optimizer and clipping from the config; there is no DeepSpeed engine.
            "fsdp2", "torch FSDP2, CPU offload", base_config, placement=Placement(), host_nbytes_per_param=20,
            semantics="master weights and gradient reduction follow torch's rules, not DeepSpeed's",
            program="train_fsdp",
        ),
    )
}  # fmt: skip
