# SPDX-License-Identifier: Apache-2.0
"""One measured training run with DeepSpeed, stock or with TenCache, depending on the config.

    deepspeed --module benchmarks.training.train_step task.json    # a benchmarks.record.Task

The training is that of any DeepSpeed script; stock's modes, ZenFlow and SuperOffload need nothing but their config.
TenCache is mentioned only where its transfers are metered and its own counters read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch

from .. import workloads
from ..record import Task
from .measured_run import MeasuredRun, Trainee, limit_gpu_memory, nvme_paths, run_task
from .storage_meter import StorageMeter
from .warm_up import has_settled

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedTrainee(Trainee):
    """A DeepSpeed engine under measurement."""

    def __init__(self, model: torch.nn.Module, task: Task, device: torch.device) -> None:
        config = task.deepspeed_config
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.engine = engine
        self.device: torch.device = engine.device
        self.vocabulary: int = engine.module.config.vocab_size
        self.numel: int = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        self.tencache = getattr(engine.optimizer, "tencache", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.engine(input_ids=tokens, labels=tokens, use_cache=False).loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def loss_scale(self) -> float | None:
        scale = getattr(self.engine.optimizer, "cur_scale", None) if self.engine.fp16_enabled() else None
        return None if scale is None else float(scale)

    def n_skipped(self) -> int:
        return int(self.engine.skipped_steps)

    def settled(self) -> bool:
        return has_settled(self.tencache)

    def stall_s(self) -> float:
        # look(), since stats() waits for what goes on behind the training.
        return 0.0 if self.tencache is None else sum(self.tencache.look().total.stall_seconds.values())

    def counts(self) -> dict[str, Any] | None:
        return None if self.tencache is None else dataclasses.asdict(self.tencache.look().total)

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


def building(task: Task, device: torch.device, run: MeasuredRun) -> AbstractContextManager[object]:
    """The context in which the model is built: partitioned at once, or whole for a peer that needs it so."""
    meter_storage(run.meter, task.deepspeed_config)
    limit_gpu_memory(task.gpu_nbytes)
    if task.zero_init:
        return deepspeed.zero.Init(config_dict_or_path=task.deepspeed_config)
    return same_weights_as_zero_init(DTYPES[task.workload.precision], device)


def main() -> None:
    run, trainee = run_task(building, DeepSpeedTrainee)
    trainee.engine.destroy()
    if trainee.tencache is not None and deepspeed.comm.get_rank() == 0:
        print(compare_counters(run.meter, trainee.tencache.stats()), flush=True)


if __name__ == "__main__":
    main()
