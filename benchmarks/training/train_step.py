# SPDX-License-Identifier: Apache-2.0
"""One measured training run with DeepSpeed, stock or with TenCache, depending on the config.

    deepspeed --module benchmarks.training.train_step task.json    # a benchmarks.record.Task

The training is that of any DeepSpeed script; stock's modes, ZenFlow and SuperOffload need nothing but their config.
TenCache is mentioned only where its transfers are metered and its own counters read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from .. import workloads
from ..record import Task
from .measured_run import (
    MODEL_SEED,
    MeasuredRun,
    limit_gpu_memory,
    local_rank,
    nvme_paths,
    use_deterministic_algorithms,
)
from .storage_meter import StorageMeter

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedTrainee:
    """A DeepSpeed engine under measurement (:class:`.measured_run.Trainee`)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.device: torch.device = engine.device
        self.vocabulary: int = engine.module.config.vocab_size
        self.numel: int = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        self.tencache = getattr(engine.optimizer, "tencache", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._engine(input_ids=tokens, labels=tokens, use_cache=False).loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def loss_scale(self) -> float | None:
        scale = getattr(self._engine.optimizer, "cur_scale", None) if self._engine.fp16_enabled() else None
        return None if scale is None else float(scale)

    def n_skipped(self) -> int:
        return int(self._engine.skipped_steps)

    def stall_s(self) -> float:
        return 0.0 if self.tencache is None else sum(self.tencache.stats().total.stall_seconds.values())

    def stats(self) -> dict[str, Any] | None:
        return None if self.tencache is None else dataclasses.asdict(self.tencache.stats())


def meter_storage(meter: StorageMeter, config: dict[str, Any]) -> None:
    """Puts the meter at the storage calls that a config leads to. Call it before the first handle is made.

    Raises:
        ValueError: the config asks for GPUDirect Storage, whose handles are not metered.
        RuntimeError: DeepSpeed's async_io op cannot be loaded, or is one that this benchmark does not know.
    """
    if not nvme_paths(config):
        return
    if config.get("aio", {}).get("use_gds"):
        raise ValueError('"aio.use_gds" is on: this benchmark counts bytes at aio_handle only; omit the option')
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with_tencache = "offload_engine" in config or "offload_engine" in config["zero_optimization"]
    try:
        meter.meter_handles(AsyncIOBuilder().load(verbose=False))
    except Exception as error:  # builds fail in too many ways to list
        if not with_tencache:
            raise RuntimeError(
                f"stock NVMe offload needs DeepSpeed's async_io op, which fails to load: {error}"
            ) from error
        print(f"aio_handle is not metered; TenCache runs without it: {type(error).__name__}: {error}", flush=True)
    if with_tencache:
        from tencache_ds.io import GdsBackend, NativeBackend
        from tencache_ds.io.backends.posix import PosixFiles

        meter.meter_files(PosixFiles)
        for backend in (NativeBackend, GdsBackend):
            meter.meter_requests(backend)


@contextmanager
def same_weights_as_zero_init(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within it a model is built whole, with the weights it would have under ``deepspeed.zero.Init``.

    There every tensor is drawn in the training precision on the device by its module's own constructor, and
    partitioned at once, so that the initialisation by transformers afterwards finds nothing to change. Buffers that
    transformers computes (rotary frequencies) may differ in the last bit of 16, so losses agree to 4 digits or so.
    """
    import transformers

    whole = mock.patch.object(transformers.PreTrainedModel, "initialize_weights", return_value=None)
    with device, whole, workloads.default_dtype(dtype):
        yield


def compare_counters(meter: StorageMeter, stats: Any) -> str:
    """One line on whether TenCache's own byte counters agree with the meter, of the statistics of an engine at rest."""
    counts = meter.counts()
    counted = (stats.total.nbytes["nvme_read"], stats.total.nbytes["nvme_write"])
    metered = (counts.read_nbytes, counts.write_nbytes)
    verdict = "agree" if counted == metered else "DIFFER"
    return f"bytes read and written at the storage calls {metered} and as TenCache counts {counted} {verdict}"


def main() -> None:
    task = Task.read()
    workload, config = task.workload, task.deepspeed_config

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if task.deterministic:
        use_deterministic_algorithms()
    deepspeed.init_distributed()
    get_accelerator().set_device(local_rank())
    run = MeasuredRun(task, nvme_paths(config))
    meter_storage(run.meter, config)
    limit_gpu_memory(task.gpu_nbytes)
    workloads.prepare()
    t_start = time.perf_counter()
    torch.manual_seed(MODEL_SEED)
    if task.zero_init:
        building = deepspeed.zero.Init(config_dict_or_path=config)
    else:
        device = torch.device(get_accelerator().current_device_name())
        building = same_weights_as_zero_init(DTYPES[workload.precision], device)
    with building:
        model = workloads.build(workload.model, workload.sequence, checkpointing=workload.activation_checkpointing)
    t_model = time.perf_counter()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    get_accelerator().synchronize()
    t_ready = time.perf_counter()
    trainee = DeepSpeedTrainee(engine)
    if deepspeed.comm.get_rank() == 0:
        print(
            f"model {t_model - t_start:.1f} s, initialize {t_ready - t_model:.1f} s, {trainee.numel / 1e9:.3f} B",
            flush=True,
        )
    run.train(trainee, t_model - t_start, t_ready - t_model)
    engine.destroy()
    if trainee.tencache is not None and deepspeed.comm.get_rank() == 0:
        print(compare_counters(run.meter, trainee.tencache.stats()), flush=True)


if __name__ == "__main__":
    main()
