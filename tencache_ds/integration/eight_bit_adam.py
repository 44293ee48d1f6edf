# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' 8-bit Adam and AdamW, paged or not, by chunks.

[Note: whose bits] The result is that of bitsandbytes' CPU kernel on the whole sub-group, as with stock CPU offload:
chunks begin where a block of 256 elements does, and all else is elementwise. TenCache's own kernel takes from
bitsandbytes the codes of its maps, and is compared with it, on this processor and with the installed versions, before
it is used. Where they differ, bitsandbytes' kernel updates the chunks.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from deepspeed import comm as dist

from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.planning.adam_scalars import BlockwiseScalars, blockwise_scalars
from tencache_ds.planning.chunks import SCALE_NUMEL
from tencache_ds.tensors import empty, filled, zeros
from tencache_ds.tiers.fused_adam import BlockwiseAdam, FusedAdam
from tencache_ds.tiers.kinds import (
    ADAM_IN_8_BITS,
    FIRST,
    FIRST_SCALE,
    MASTER,
    SCALES_OF_8_BITS,
    SECOND,
    SECOND_SCALE,
)
from tencache_ds.tiers.sub_group import Kinds
from tencache_ds.tiers.update import SubGroupStep

logger = logging.getLogger("DeepSpeed.tencache")

CLASSES = {name.lower(): name for name in ("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit")}
"""Classes of bitsandbytes, by the name of ``"optimizer": {"type": …}`` without case and underscores."""

_PACKAGE = "bitsandbytes"
_PROOF_NUMEL = 3 * 4096 + SCALE_NUMEL + 77
_PROOF_STEPS = 3
PROOF_TIMEOUT_S = 60.0

_Kernel = TypeVar("_Kernel", bound=FusedAdam)


def compared(kernel: _Kernel, compare: Callable[[_Kernel], None]) -> _Kernel:
    """A kernel, once it was compared with what it stands in for; closed if the comparison raises."""
    try:
        compare(kernel)
    except BaseException:
        kernel.close()
        raise
    return kernel


class EightBitAdam:
    """The arithmetic of one optimizer. Its op, bitsandbytes' own, is a
    :class:`~tencache_ds.tiers.host_update.ChunkOp`.

    Args:
        optimizer: of bitsandbytes.
    """

    scales: Kinds = tuple(SCALES_OF_8_BITS.items())
    """``(kind, dtype)`` of state with one value for several elements."""

    temporaries_in_chunks = 4
    """Memory that its op needs for a chunk, in chunks: six copies in fp32."""

    powers = None
    """Nothing of a step depends on the one before."""

    def __init__(self, optimizer: Any) -> None:
        self._maps = (optimizer.name2qmap["dynamic"], optimizer.name2qmap["udynamic"])

    @classmethod
    def of(cls, optimizer: Any, numels: Sequence[int], master_dtype: torch.dtype) -> EightBitAdam | None:
        """The arithmetic of an optimizer; None of another one, and where not all of its state would be 8-bit.

        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            numels: elements of each sub-group.
            master_dtype: of the master weights.
        """
        if (
            type(optimizer).__module__.partition(".")[0] != _PACKAGE
            or getattr(optimizer, "optimizer_name", "") != "adam"
        ):
            return None
        arguments = optimizer.args
        if arguments.optim_bits != 8:
            return None
        reason = ""
        if arguments.max_unorm > 0.0 or arguments.skip_zeros:
            reason = "max_unorm and skip_zeros need all of a sub-group"
        elif optimizer.mng.pid2config or optimizer.mng.index2config:
            # Those of modules' weights, the Trainer's for embeddings, are void under ZeRO-3: no parameter is a weight.
            reason = "GlobalOptimManager overrides options of single parameters"
        elif any(0 < numel < arguments.min_8bit_size for numel in numels):
            reason = f"a sub-group has fewer elements than min_8bit_size ({arguments.min_8bit_size})"
        elif master_dtype != torch.float32:
            reason = f"master weights are {master_dtype}"
        if not reason:
            return cls(optimizer)
        if dist.get_rank() == 0:
            logger.warning("%s is updated a sub-group at a time: %s", type(optimizer).__name__, reason)
        return None

    def needed(self, sub_group: int) -> frozenset[str]:
        """Names of the states that an update of a sub-group requires once it has begun."""
        return frozenset({"step", FIRST, SECOND, FIRST_SCALE, SECOND_SCALE})

    def kinds(self, sub_group: int, master_dtype: torch.dtype) -> Kinds:
        """``(kind, dtype)`` of a sub-group's state per element, beside the master weight."""
        return tuple((kind, dtype) for kind, dtype in ADAM_IN_8_BITS.items() if kind != MASTER)

    def shared_states(self) -> Mapping[str, Any]:
        """States that the optimizer makes at its first step, and never changes."""
        return {"qmap1": self._maps[0], "qmap2": self._maps[1]}

    def one_pass(self, n_threads: int) -> BlockwiseAdam:
        """The same in one pass, on so many threads.

        Raises:
            ConfigError: the op cannot be built.
            TenCacheError: its bits would not be those of bitsandbytes; see [Note: whose bits].
        """
        first, second = ((values.tolist(), _codes_of(values)) for values in self._maps)
        return compared(BlockwiseAdam(n_threads, first, second, _square_root()), self._compare)

    def scalars(self, number: int, group: Mapping[str, Any], scale: float) -> tuple[BlockwiseScalars, int]:
        """See :meth:`CpuAdam.scalars <tencache_ds.integration.chunk_update.CpuAdam.scalars>`."""
        beta1, beta2 = group["betas"]
        scalars = blockwise_scalars(
            lr=group["lr"],
            betas=(beta1, beta2),
            step=number,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            scale=scale,
        )
        return scalars, 0

    def load(self) -> None:
        """See :meth:`ChunkOp.load`: nothing to do, the optimizer has loaded it."""

    def __call__(self, step: SubGroupStep, state: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """See :class:`ChunkOp`."""
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            state[MASTER],
            state[FIRST],
            state[SECOND],
            *step.hyper["betas"],
            0.0,
            0.0,
            step.hyper["eps"],
            step.number,
            step.hyper["lr"],
            *self._maps,
            state[FIRST_SCALE],
            state[SECOND_SCALE],
            step.hyper["weight_decay"],
            1.0,
            False,
        )

    @torch.no_grad()
    def _compare(self, adam: BlockwiseAdam) -> None:
        """Raises TenCacheError unless both make the same of some steps."""
        generator = torch.Generator().manual_seed(0)
        theirs = {kind: zeros(_PROOF_NUMEL, dtype) for kind, dtype in ADAM_IN_8_BITS.items()}
        theirs |= {kind: zeros(-(-_PROOF_NUMEL // SCALE_NUMEL), dtype) for kind, dtype in self.scales}
        theirs[MASTER].normal_(generator=generator)
        ours = {kind: value.clone() for kind, value in theirs.items()}
        weight = empty(_PROOF_NUMEL, torch.bfloat16)
        for number in range(1, _PROOF_STEPS + 1):
            group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 * (number % 2)}
            gradient = empty(_PROOF_NUMEL, torch.float32).normal_(generator=generator)
            gradient *= empty(_PROOF_NUMEL, torch.float32).normal_(generator=generator).exp_()
            scalars, _ = self.scalars(number, group, 1.0)
            self(SubGroupStep(0, 0, number, 1.0, group, scalars), theirs, gradient)
            ended = adam.start(ours, gradient, [(0, weight)], scalars).wait(PROOF_TIMEOUT_S)
            if not ended or not all(torch.equal(ours[kind], theirs[kind]) for kind in ours):
                version = importlib.import_module(_PACKAGE).__version__
                raise TenCacheError(
                    f"on this processor, TenCache's 8-bit Adam differs from that of bitsandbytes {version} with torch "
                    f"{torch.__version__}, which is used instead"
                )


def _codes_of(values: torch.Tensor) -> bytes:
    """The code that bitsandbytes gives each of 65536 equidistant values from -1 to 1: it looks no closer."""
    n_codes, others = 1 << 16, SCALE_NUMEL - 1
    wanted = torch.from_numpy(np.linspace(-1.0, 1.0, n_codes).astype(np.float32))
    blocks = filled(-(-n_codes // others) * SCALE_NUMEL, 1.0, torch.float32).view(-1, SCALE_NUMEL)  # of this magnitude
    padded = zeros(blocks.shape[0] * others, torch.float32)
    padded[:n_codes] = wanted
    blocks[:, 1:] = padded.view(-1, others)
    codes, _ = torch.ops.bitsandbytes.quantize_blockwise(blocks.view(-1), values, SCALE_NUMEL)
    return codes.view(-1, SCALE_NUMEL)[:, 1:].reshape(-1)[:n_codes].numpy().tobytes()


@functools.cache
def _square_root() -> tuple[int, int]:
    """Addresses of ``vmsSqrt`` and ``MKL_Set_Num_Threads_Local`` in torch's library; zeros where torch has its square
    roots from the processor."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        square_root, set_threads = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (library.vmsSqrt, library.MKL_Set_Num_Threads_Local)
        )
    except (OSError, AttributeError):
        return 0, 0
    return square_root, set_threads


def nested(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """A sub-group's state as the optimizer's ``state_dict()`` has it: newer versions of bitsandbytes put what is not of
    a parameter's shape or dtype one level deeper."""
    inner = getattr(optimizer, "_FSDP_WRAPPED_QUANT_STATE_KEY", None)
    if inner is None:
        return dict(state)
    deeper = {kind: value for kind, value in state.items() if kind in optimizer.non_castable_tensor_keys}
    outside = {kind: value for kind, value in state.items() if kind not in deeper and kind != inner}
    return outside | {inner: {**state.get(inner, {}), **deeper}}


def class_named(name: str | None) -> str | None:
    """bitsandbytes' class for an optimizer's name in a config, as in ``adamw_8bit``; None of another one."""
    return CLASSES.get((name or "").lower().replace("_bnb_", "_").replace("_", ""))


def build(name: str, parameters: Any, arguments: Mapping[str, Any]) -> Any:
    """An optimizer of bitsandbytes, which ZeRO takes from now on.

    Args:
        name: of its class.
        parameters: of the model, or groups of them.
        arguments: ``optimizer.params`` of the config.

    Raises:
        ConfigError: bitsandbytes is not installed, or does not know an argument.
    """
    from deepspeed.runtime.zero import utils

    try:
        kind = getattr(importlib.import_module(f"{_PACKAGE}.optim"), name)
    except ImportError as error:
        raise ConfigError(
            f'"optimizer.type": "{name}" needs bitsandbytes: pip install bitsandbytes ({error})'
        ) from error
    try:
        optimizer = kind(parameters, **arguments)
    except TypeError as error:
        raise ConfigError(f'"optimizer.params" of "{name}": {error}') from error
    if kind not in utils.ZERO_SUPPORTED_OPTIMIZERS:
        utils.ZERO_SUPPORTED_OPTIMIZERS.append(kind)
    return optimizer
