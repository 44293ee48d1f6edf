# SPDX-License-Identifier: Apache-2.0
"""The optimizers that DeepSpeed may wrap: how they are updated, the states they keep, and the owner of these for each
sub-group.

A state with one value per element lives in the tier, next to the master weights. Everything else (step numbers,
scalars, factored states) stays in ``optimizer.state`` under the sub-group's placeholder, the flat tensor by which the
optimizer knows the sub-group.

Between two steps a user sees there: for a sub-group in host memory the same as with stock CPU offload, the placeholder
being the master weights and ``optimizer.state`` holding the tier's own tensors; for one on NVMe only the states that
are not per element, under an empty placeholder.

[Note: whose bits] bitsandbytes' 8-bit Adam and AdamW, paged or not, are updated by chunks. The result is that of its
CPU kernel on the whole sub-group, as with stock CPU offload: chunks begin where a block of 256 elements does, and all
else is elementwise. TenCache's own kernel takes from bitsandbytes the codes of its maps, and is compared with it, on
this processor and with the installed versions, before it is used. Where they differ, bitsandbytes' kernel updates the
chunks.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from torch.optim import optimizer as torch_optimizer

from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.planning.adam_scalars import BlockwiseScalars, blockwise_scalars
from tencache_ds.planning.chunks import SCALE_NUMEL
from tencache_ds.tensors import empty, filled, zeros
from tencache_ds.tiers.fused_adam import BlockwiseAdam, FusedAdam
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import (
    ADAM_IN_8_BITS,
    FIRST,
    FIRST_SCALE,
    MASTER,
    SCALES_OF_8_BITS,
    SECOND,
    SECOND_SCALE,
    Kinds,
)
from tencache_ds.tiers.update import SubGroupStep

_Groups = list[dict[str, Any]]
_KINDS: Mapping[type, Callable[[_Groups], tuple[str, ...]]] = {
    DeepSpeedCPUAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    DeepSpeedCPULion: lambda groups: ("exp_avg", "exp_avg_sq"),  # the second is created, and never used
    DeepSpeedCPUAdagrad: lambda groups: ("exp_avg_sq",),
    torch.optim.Adam: lambda groups: ("exp_avg", "exp_avg_sq", *_where(groups, "amsgrad", "max_exp_avg_sq")),
    torch.optim.AdamW: lambda groups: ("exp_avg", "exp_avg_sq", *_where(groups, "amsgrad", "max_exp_avg_sq")),
    torch.optim.NAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: lambda groups: ("exp_avg", "exp_inf"),
    torch.optim.Adadelta: lambda groups: ("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda groups: ("sum",),
    torch.optim.ASGD: lambda groups: ("ax",),
    torch.optim.Rprop: lambda groups: ("prev", "step_size"),
    torch.optim.SGD: lambda groups: _where(groups, "momentum", "momentum_buffer"),
    torch.optim.RMSprop: lambda groups: (
        "square_avg",
        *_where(groups, "momentum", "momentum_buffer"),
        *_where(groups, "centered", "grad_avg"),
    ),
}


def known_kinds(optimizer: Any, master_dtype: torch.dtype) -> Kinds:
    """``(kind, dtype)`` of the states an optimizer is known to keep per element, besides the master weight.

    Of optimizers not listed they turn up at the first step; knowing them reserves their space at the start.
    """
    kinds_of = _KINDS.get(type(optimizer))
    kinds = kinds_of(optimizer.param_groups) if kinds_of is not None else ()
    in_fp32 = getattr(optimizer, "fp32_optimizer_states", False)
    return tuple((kind, torch.float32 if in_fp32 else master_dtype) for kind in kinds)


def step_is_watched(optimizer: Any) -> bool:
    """Whether something observes ``optimizer.step()``: a step hook, its own or a global one, or a replacement of
    ``step``.

    The function that an LR scheduler puts there only notes that ``step`` was called.
    """
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    step = optimizer.step
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return any(hooks) or getattr(step, "__func__", step) is not type(optimizer).step


def _where(groups: _Groups, option: str, kind: str) -> tuple[str, ...]:
    """``kind`` if an option of some parameter group asks for it."""
    return (kind,) if any(group.get(option) for group in groups) else ()


class OptimizerStates:
    """Which states each sub-group has, and where. Used by the training thread."""

    def __init__(
        self,
        optimizer: Any,
        tier: OptimizerStateTier,
        placeholders: Sequence[torch.Tensor],
        needed: Callable[[int], frozenset[str]] | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and per-element states live.
            placeholders: per sub-group, the tensor under which the optimizer knows it.
            needed: names of the states that the update of a sub-group cannot do without once it has begun; None if not
                known.
            shared: states that the optimizer makes in a sub-group's first step, and never changes.
        """
        self._optimizer = optimizer
        self._tier = tier
        self._placeholders = placeholders
        self._needed = needed or (lambda sub_group: frozenset())
        self._shared = shared or {}
        self._kinds: list[tuple[str, ...]] = [() for _ in placeholders]
        # ZeRO has replaced the parameters that the optimizer was created with by placeholders.
        for key in [key for key in optimizer.state if torch.is_tensor(key)]:
            del optimizer.state[key]
        for sub_group in range(len(placeholders)):
            self._begin(sub_group)
            self.show(sub_group)

    def kinds(self, sub_group: int) -> tuple[str, ...]:
        """The per-element states that the optimizer has created for a sub-group, in a step or by loading.

        The tier may have room for more: those hold zeros that mean nothing yet.
        """
        return self._kinds[sub_group]

    def started(self, sub_group: int) -> bool:
        """Whether the optimizer has any state for a sub-group."""
        return bool(self._kinds[sub_group]) or bool(self._optimizer.state.get(self._placeholders[sub_group]))

    def n_steps(self, sub_group: int) -> int:
        """How many steps the optimizer has counted of a sub-group."""
        return int(self._optimizer.state.get(self._placeholders[sub_group], {}).get("step", 0))

    def begin_step(self, sub_group: int) -> Any:
        """Counts a step of a sub-group whose states are zero before the first one; returns the step's number, 0 of one
        whose update does not depend on it."""
        if "step" not in self._needed(sub_group):
            return 0
        state = self._optimizer.state[self._placeholders[sub_group]]
        if "step" not in state:
            state.update(self._shared)
        state["step"] = state.get("step", 0) + 1
        if not self._kinds[sub_group]:
            self._kinds[sub_group] = self._tier.kinds(sub_group)[1:]
            self.show(sub_group)
        return state["step"]

    @contextmanager
    def whole(self, sub_group: int) -> Iterator[torch.Tensor]:
        """The sub-group's placeholder, its data the master weights and its states in ``optimizer.state``, whole.

        The contents at the end are the sub-group's state. Nothing of a sub-group in host memory is copied.

        Raises:
            SpaceError: NVMe has no space for the states that the optimizer created.
            StorageError: a read failed.
        """
        placeholder, values = self._placeholders[sub_group], self._tier.borrow(sub_group)
        try:
            placeholder.data = values[MASTER]
            self._optimizer.state[placeholder].update((kind, values[kind]) for kind in self._kinds[sub_group])
            del values
            yield placeholder
            states = self._per_element(sub_group)
            self._tier.keep(sub_group, {MASTER: placeholder.data} | states)
            self._kinds[sub_group] = tuple(states)
        finally:
            self.show(sub_group)

    def replace(self, sub_group: int, master: torch.Tensor, *, with_state: bool) -> None:
        """Puts loaded values in the place of a sub-group's.

        Args:
            sub_group: which one.
            master: the master weights, 1-D, in any float dtype.
            with_state: what ``optimizer.state`` holds for the sub-group now was loaded as well, and is all the state
                it has: every other is as if no step had been taken. Without, the states stay as they are.

        Raises:
            SpaceError: the loaded states need more room on NVMe than there is.
            TenCacheError: the loaded states are those of another optimizer.
        """
        master = master.detach().to(self._placeholders[sub_group].dtype)
        if not with_state:
            self._tier.write(sub_group, {MASTER: master})
            return
        loaded = self._optimizer.state.get(self._placeholders[sub_group], {})
        missing = self._needed(sub_group) - set(loaded)
        if loaded and missing:
            raise TenCacheError(
                f"the loaded optimizer state of sub-group {sub_group} holds {sorted(loaded)}, but "
                f"{type(self._optimizer).__name__} needs {sorted(missing)} too: it was saved with another optimizer. "
                "Load it with load_optimizer_states=False, or use the optimizer it was saved with."
            )
        states = self._per_element(sub_group)
        self._tier.replace(sub_group, {MASTER: master} | states)
        self._kinds[sub_group] = tuple(states)
        self._begin(sub_group)
        self.show(sub_group)

    def _per_element(self, sub_group: int) -> dict[str, torch.Tensor]:
        """The entries of ``optimizer.state`` with one value per element of a sub-group, and the scales of these that
        the tier keeps.

        A state that has the name of the tier's master weights stays where it is.
        """
        state = self._optimizer.state.get(self._placeholders[sub_group], {})
        return {
            kind: value.detach()
            for kind, value in state.items()
            if torch.is_tensor(value)
            and value.shape == (self._tier.numel(sub_group, kind),)
            and value.layout is torch.strided
            and kind != MASTER
        }

    def show(self, sub_group: int) -> None:
        """Sets the states visible between two steps under the placeholder."""
        placeholder = self._placeholders[sub_group]
        placeholder.grad = None
        if self._tier.whole(sub_group):
            values = self._tier.borrow(sub_group)
            placeholder.data = values[MASTER]
            if self._kinds[sub_group]:
                self._optimizer.state[placeholder].update((kind, values[kind]) for kind in self._kinds[sub_group])
            return
        state = self._optimizer.state.get(placeholder, {})
        for kind in self._per_element(sub_group):
            del state[kind]
        placeholder.data = empty(0, placeholder.dtype)

    def _begin(self, sub_group: int) -> None:
        """torch's Adagrad creates its states in its constructor, for parameters that ZeRO has replaced since."""
        if not isinstance(self._optimizer, torch.optim.Adagrad) or self.started(sub_group):
            return
        with self.whole(sub_group) as placeholder:
            fresh = torch.optim.Adagrad([placeholder], **self._optimizer.defaults)
            self._optimizer.state[placeholder] = fresh.state[placeholder]


# bitsandbytes' 8-bit Adam


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
