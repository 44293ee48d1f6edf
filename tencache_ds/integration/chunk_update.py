# SPDX-License-Identifier: Apache-2.0
"""One sub-group's optimizer step for the optimizer that DeepSpeed wraps: chunk by chunk where its arithmetic is
known, the whole sub-group at once for all others. The update itself is :mod:`tencache_ds.tiers.update`.

[Note: CPU Adam] DeepSpeed's CPU Adam op, compiled and loaded only if it gets elements to update, with the powers of the
betas that a run has which never stopped.

``DeepSpeedCPUAdam`` loads it in its constructor. Where TenCache updates every chunk in one pass, that is a wasted
minute or more of compilation at the first start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.optimizer_states import (
    PROOF_TIMEOUT_S,
    EightBitAdam,
    OptimizerStates,
    compared,
    known_kinds,
)
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.planning.adam_scalars import (
    AdamScalars,
    BetaPowers,
    DescentScalars,
    adam_scalars,
    single,
    steps_to_multiply,
)
from tencache_ds.tensors import Scratch, empty
from tencache_ds.tiers.device_update import DeviceUpdate, TritonAdam
from tencache_ds.tiers.fused_adam import AdamAndDescent, FusedAdam
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.host_update import ArithmeticCores, FusedUpdate, UnfusedUpdate, WholeUpdate
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, Kinds
from tencache_ds.tiers.update import ChunkedUpdate, SubGroupStep, UpdateKernel, WeightWriter

logger = logging.getLogger("DeepSpeed.tencache")


class LazyCpuAdam:
    """Stands in for the op's module in one ``DeepSpeedCPUAdam``. Used by the thread that updates.

    Whoever updates elements, DeepSpeed's ``step()`` or TenCache, the powers of the betas are those of all steps: the op
    has its own, which are brought there when it gets elements.

    Args:
        load: builds and loads the op.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._op: Any = None
        self._creation: tuple[Any, ...] = ()
        self._op_powers: tuple[Any, int, int] | None = None  # betas, step of the last ``pow``, step; None if not known
        self.powers = BetaPowers((0.0, 0.0), pow_when_repeated=calls.pow_when_repeated)
        """Those of the last step."""

    @classmethod
    def of(cls, optimizer: Any) -> LazyCpuAdam:
        """The one of a ``DeepSpeedCPUAdam``, whose op may be loaded already: then it gets one."""
        if not isinstance(optimizer.ds_opt_adam, cls):
            op, optimizer.ds_opt_adam = optimizer.ds_opt_adam, cls(lambda: op)
            optimizer.ds_opt_adam._op = op
        return optimizer.ds_opt_adam

    @property
    def loaded(self) -> bool:
        """Whether the op had to be loaded."""
        return self._op is not None

    def load_now(self) -> None:
        """Loads the op, if it is not loaded yet."""
        if self._op is None:
            self._op = self._load()
            self._op.create_adam(*self._creation)

    def create_adam(self, *arguments: Any) -> None:
        """Noted, for the op."""
        self._creation = arguments

    def destroy_adam(self, opt_id: int) -> None:
        """Passed on, if there is an op."""
        if self._op is not None:
            self._op.destroy_adam(opt_id)

    def adam_update(self, opt_id: int, step: int, lr: float, beta1: float, beta2: float, *arguments: Any) -> None:
        """DeepSpeed's call: passed on, unless it is without elements and only counts the step."""
        self.powers.at(step, (beta1, beta2))
        if arguments[-1].numel():
            self.update(self.powers.pow_step, opt_id, step, lr, beta1, beta2, *arguments)

    def update(
        self, pow_step: int, opt_id: int, step: int, lr: float, beta1: float, beta2: float, *arguments: Any
    ) -> None:
        """Updates elements with the powers of a step.

        Args:
            pow_step: the step from whose ``pow`` they have been multiplied up, see :class:`BetaPowers`.
            opt_id: like all others, as the op takes it.
        """
        self.load_now()
        nothing = [empty(0, torch.float32)] * 4
        betas = single((beta1, beta2))

        def count(step: int, betas: tuple[Any, Any] = betas) -> None:
            self._op.adam_update(opt_id, step, lr, *map(float, betas), *arguments[:3], *nothing)

        there = self._op_powers == (betas, pow_step, step) and not calls.pow_when_repeated
        if not there and self._op_powers != (betas, pow_step, step - 1):
            count(0, (betas[0] + 1, betas[1]))  # it calls ``pow`` when betas change
            # To the step before, for the last multiplication. Or it jumps, to powers that make no difference any more.
            for each in range(pow_step, pow_step + steps_to_multiply(betas, pow_step, step)):
                count(each)
        self._op_powers = (betas, pow_step, step)
        self._op.adam_update(opt_id, step, lr, beta1, beta2, *arguments)


@contextlib.contextmanager
def loaded_when_needed() -> Iterator[None]:
    """While ``DeepSpeedCPUAdam`` objects are created that TenCache will update in one pass, where it can."""
    from deepspeed.ops.adam import cpu_adam

    stock: Any = cpu_adam.CPUAdamBuilder

    class Builder(stock):
        """DeepSpeed's, with ``load`` put off."""

        def load(self, verbose: bool = True) -> Any:
            from tencache_ds.ops.tencache_update import load_tencache_update

            load = super().load
            try:
                _, width = load_tencache_update().adam_variant()
            except TenCacheError as error:
                logger.debug("DeepSpeed's CPU Adam is loaded: %s", error)
                width = 0
            return LazyCpuAdam(load) if width else load(verbose)

    cpu_adam.CPUAdamBuilder = Builder
    try:
        yield
    finally:
        cpu_adam.CPUAdamBuilder = stock


class CpuAdam:
    """The arithmetic of a ``DeepSpeedCPUAdam``. Its op is a :class:`~tencache_ds.tiers.host_update.ChunkOp`.

    Args:
        optimizer: of DeepSpeed.
    """

    scales: Kinds = ()
    """``(kind, dtype)`` of state with one value for several elements."""

    temporaries_in_chunks = 1
    """Memory that its op needs for a chunk, in chunks: the gradient in fp32."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._op = LazyCpuAdam.of(optimizer)

    def needed(self, sub_group: int) -> frozenset[str]:
        """Names of the states that an update of a sub-group requires once it has begun."""
        return frozenset({"step", EXP_AVG, EXP_AVG_SQ})

    def kinds(self, sub_group: int, master_dtype: torch.dtype) -> Kinds:
        """``(kind, dtype)`` of a sub-group's state per element, beside the master weight."""
        return known_kinds(self._optimizer, master_dtype)

    def shared_states(self) -> Mapping[str, Any]:
        """States that the optimizer makes at its first step, and never changes."""
        return {}

    def one_pass(self, n_threads: int) -> FusedAdam:
        """The same in one pass, on so many threads.

        Raises:
            ConfigError, TenCacheError: it cannot be had; says why.
        """
        return FusedAdam(n_threads)

    @property
    def powers(self) -> BetaPowers | None:
        """Of its betas, at its last step: part of its state."""
        return self._op.powers

    @powers.setter
    def powers(self, powers: BetaPowers) -> None:
        self._op.powers = powers

    def scalars(self, number: int, group: Mapping[str, Any], scale: float) -> tuple[AdamScalars, int]:
        """The scalars of a step, and the step from which on powers of the betas are multiplied.

        Args:
            number: of the step, from 1.
            group: hyper-parameters.
            scale: what gradients are multiplied by.
        """
        powers = self._op.powers
        assert powers is not None
        scalars = adam_scalars(
            lr=group["lr"],
            betas=group["betas"],
            powers=powers.at(number, group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self._optimizer.adam_w_mode,
            bias_correction=group["bias_correction"],
            scale=scale,
        )
        return scalars, powers.pow_step

    def load(self) -> None:
        """See :meth:`ChunkOp.load`."""
        self._op.load_now()

    def __call__(self, step: SubGroupStep, state: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """See :class:`ChunkOp`."""
        group = step.hyper
        self._op.update(
            step.pow_step,
            self._optimizer.opt_id,
            step.number,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            state[MASTER],
            gradient,
            state[EXP_AVG],
            state[EXP_AVG_SQ],
        )


class MuonWithCpuAdam(CpuAdam):
    """The arithmetic of a ``MuonWithAuxAdam``, once gradients are orthogonalized.

    Args:
        optimizer: of DeepSpeed, with a ``DeepSpeedCPUAdam`` as its auxiliary optimizer.
        uses_muon: of each sub-group, whether its parameters are matrices of Muon's.
    """

    def __init__(self, optimizer: Any, uses_muon: Sequence[bool]) -> None:
        super().__init__(optimizer.aux_optimizer)
        self._uses_muon = tuple(uses_muon)

    @classmethod
    def of(cls, optimizer: Any, uses_muon: Sequence[bool]) -> MuonWithCpuAdam | None:
        """The arithmetic of an optimizer; None of another one, or with another auxiliary optimizer."""
        if uses_muon and type(getattr(optimizer, "aux_optimizer", None)) is DeepSpeedCPUAdam:
            return cls(optimizer, uses_muon)
        return None

    def kinds(self, sub_group: int, master_dtype: torch.dtype) -> Kinds:
        """See :meth:`CpuAdam.kinds`; momentum is kept apart, by :class:`~tencache_ds.tiers.momentum.Momentum`."""
        return () if self._uses_muon[sub_group] else super().kinds(sub_group, master_dtype)

    def needed(self, sub_group: int) -> frozenset[str]:
        """See :meth:`CpuAdam.needed`."""
        return frozenset({MOMENTUM}) if self._uses_muon[sub_group] else super().needed(sub_group)

    def one_pass(self, n_threads: int) -> AdamAndDescent:
        """See :meth:`CpuAdam.one_pass`.

        Raises:
            ConfigError: the op cannot be built.
            TenCacheError: its bits would not be torch's.
        """
        return compared(AdamAndDescent(n_threads), _compare_with_torch)

    def scalars(self, number: int, group: Mapping[str, Any], scale: float) -> tuple[Any, int]:
        """See :meth:`CpuAdam.scalars`."""
        return (_descent(group, scale), 0) if group["use_muon"] else super().scalars(number, group, scale)

    def load(self) -> None:
        """Nothing: Adam's op is loaded when it gets elements."""

    def __call__(self, step: SubGroupStep, state: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """See :class:`ChunkOp`."""
        group = step.hyper
        if not group["use_muon"]:
            super().__call__(step, state, gradient)
            return
        descent = _descent(group, 1.0)
        state[MASTER].mul_(descent.retained).add_(gradient, alpha=descent.step)


def _descent(group: Mapping[str, Any], scale: float) -> DescentScalars:
    """What ``MuonWithAuxAdam.step()`` does with an orthogonalized gradient."""
    return DescentScalars(scale, 1 - group["lr"] * group["weight_decay"], -group["lr"])


@torch.no_grad()
def _compare_with_torch(fused: AdamAndDescent) -> None:
    """Raises TenCacheError unless a step along the gradient is torch's: how that is contracted is its compiler's
    choice."""
    generator = torch.Generator().manual_seed(0)
    for numel in (*range(1, 80), 32 * 1024 + 37):
        theirs = empty(numel, torch.float32).normal_(generator=generator)
        gradient = empty(numel, torch.float32).normal_(generator=generator)
        ours, weight, scalars = theirs.clone(), empty(numel, torch.bfloat16), DescentScalars(0.3, 1 - 0.02 * 0.1, -0.02)
        job = fused.start({MASTER: ours}, gradient, [(0, weight)], scalars)
        theirs.mul_(scalars.retained).add_(gradient * scalars.scale, alpha=scalars.step)
        if not job.wait(PROOF_TIMEOUT_S) or not torch.equal(ours, theirs):
            raise TenCacheError("on this processor, Muon's step in one pass differs from that of torch, which is used")


def chunk_arithmetic(
    optimizer: Any, numels: Sequence[int], master_dtype: torch.dtype, uses_muon: Sequence[bool]
) -> CpuAdam | EightBitAdam | None:
    """The arithmetic of an optimizer; None where only its own ``step()`` knows it.

    Args:
        optimizer: the torch optimizer DeepSpeed wraps.
        numels: elements of each sub-group.
        master_dtype: of the master weights.
        uses_muon: of each sub-group, whether its parameters are matrices of Muon's; empty with any other optimizer.
    """
    if type(optimizer) is DeepSpeedCPUAdam:
        return CpuAdam(optimizer)
    return MuonWithCpuAdam.of(optimizer, uses_muon) or EightBitAdam.of(optimizer, numels, master_dtype)


class SubGroupUpdater:
    """Applies an optimizer to the sub-groups of an :class:`OptimizerStateTier`. Used by the training thread."""

    def __init__(
        self,
        optimizer: Any,
        tier: OptimizerStateTier,
        states: OptimizerStates,
        gradients: GradientTier,
        writer: WeightWriter,
        *,
        cores: int,
        arithmetic: CpuAdam | EightBitAdam | None,
        fused: FusedAdam | None,
        device: tuple[DeviceMemory, TritonAdam] | None = None,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and moments live.
            states: the optimizer's states of each sub-group.
            gradients: the accumulated gradients.
            writer: where the model's weights get their new values.
            cores: how many of the host's cores arithmetic may use here.
            arithmetic: of the optimizer; None leaves it to its ``step()``.
            fused: the same in one pass; None leaves it to the optimizer's own op.
            device: memory of the compute device, and Adam on state there; None where there is none. Not without
                ``fused``.
        """
        self._optimizer = optimizer
        self._states = states
        self.arithmetic = arithmetic
        """By which it is updated by chunks."""
        limit, scratch = ArithmeticCores(cores, tier.streamed), Scratch()
        kernels: list[UpdateKernel] = [] if arithmetic is None else [UnfusedUpdate(arithmetic, limit, scratch)]
        in_place = None
        self.one_pass_states: tuple[Mapping[str, torch.dtype], ...] = () if fused is None else fused.states
        """Chunks with state of such dtypes are updated on threads of the update's own, and nothing else of the
        process."""
        if fused is not None:
            kernels.insert(0, FusedUpdate(fused))
            if device is not None:
                memory, adam = device
                in_place = DeviceUpdate(adam, fused.width, memory, tier, gradients, writer)
        self.by_chunks = ChunkedUpdate(tier, gradients, writer, kernels, in_place)
        """The optimizer on chunks, with its arithmetic on the whole sub-group. Chunks begin at multiples of every
        vector width, and where scales do, so the result is the same bit for bit."""
        self._as_whole = WholeUpdate(tier, gradients, writer, limit, scratch)

    @property
    def beta_powers(self) -> BetaPowers | None:
        """Those of the last step of DeepSpeed's CPU Adam; None with any other optimizer."""
        return None if self.arithmetic is None else self.arithmetic.powers

    def resume(self, saved: Mapping[str, Any] | None, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the powers of the betas to where they were when a checkpoint was saved, after its states.

        Args:
            saved: their :meth:`BetaPowers.state_dict`. None, in a checkpoint of stock DeepSpeed or of an older version,
                means that betas never changed: each group of parameters had those that it has now.
            groups: the hyper-parameters of each sub-group, as loaded.
        """
        if not isinstance(self.arithmetic, CpuAdam):
            return
        if saved is None:
            counted = [index for index in range(len(groups)) if "step" in self.arithmetic.needed(index)]
            step, betas = self._states.n_steps(counted[-1]), tuple(groups[counted[-1]]["betas"])
            jumped = any(tuple(groups[index]["betas"]) != betas for index in counted)
            jumped |= calls.pow_when_repeated and len(counted) > 1
            saved = {"betas": betas, "step": step, "pow_step": step if jumped else 0}
        self.arithmetic.powers = BetaPowers(**saved, pow_when_repeated=calls.pow_when_repeated)

    def begin_step(self, sub_group: int, group: dict[str, Any], start: int, scale: Any) -> SubGroupStep:
        """Counts a step of a sub-group that is updated by chunks, and captures all that it depends on.

        Args:
            sub_group: which one.
            group: its hyper-parameters (an entry of ``optimizer.param_groups``).
            start: first element of the sub-group in the gradient buffer.
            scale: factor applied to gradients: a float or a 0-dim tensor.

        Returns:
            The step, for :attr:`by_chunks`.
        """
        if self.arithmetic is None:
            raise TenCacheError(f"{type(self._optimizer).__name__} is not updated by chunks")
        number = int(self._states.begin_step(sub_group))
        scalars, pow_step = self.arithmetic.scalars(number, group, float(scale))
        # Of its parameter groups none has a parameter now, so this changes nothing, but torch sees that a step was
        # taken: LR schedulers ask for it, profilers show it.
        self._optimizer.step()
        return SubGroupStep(sub_group, start, number, scale, group, scalars, pow_step)

    def update_as_whole(self, sub_group: int, start: int, scale: Any, step: Callable[[], None]) -> None:
        """Any optimizer, through its own ``step()``, with the sub-group's whole state in host memory for as long.

        Of a sub-group that is whole in host memory the optimizer works on the tier's own tensors.

        Args:
            sub_group: which one.
            start: first element of the sub-group in the gradient buffer.
            scale: factor applied to gradients: a float or a 0-dim tensor.
            step: calls ``optimizer.step()`` for the sub-group's placeholder.
        """
        self._as_whole.run(sub_group, start, scale, self._states.whole(sub_group), step)
