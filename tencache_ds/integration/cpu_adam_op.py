# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's CPU Adam op, compiled and loaded only if it gets elements to update, with the powers of the betas that a
run has which never stopped.

``DeepSpeedCPUAdam`` loads it in its constructor. Where TenCache updates every chunk in one pass, that is a wasted
minute or more of compilation at the first start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.planning.adam_scalars import BetaPowers, single, steps_to_multiply
from tencache_ds.tensors import empty

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
