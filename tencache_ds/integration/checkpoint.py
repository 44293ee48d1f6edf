# SPDX-License-Identifier: Apache-2.0
"""Contents of a ZeRO-3 optimizer checkpoint with TenCache, the same as with CPU offload, and loading it.

Stock NVMe offload copies its swap files beside the checkpoint and loses Adam's state on resume. Here
``zero_to_fp32.py``, stock CPU offload and universal checkpoints can read the saved files, and vice versa. The files are
written by :mod:`tencache_ds.integration.checkpoint_saving`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.errors import CheckpointError, TenCacheError
from tencache_ds.integration import optimizer_states
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.integration.agreement import JobVotes
from tencache_ds.integration.background_save import BackgroundSave, StateKey, Visit, agree_on_checkpoint
from tencache_ds.integration.model_weights import in_tier
from tencache_ds.integration.resharding import SavedFiles, hook_resharding
from tencache_ds.integration.seams import Feature, require
from tencache_ds.io.torch_archive import DeferredTensor
from tencache_ds.runtime.step_guard import Part
from tencache_ds.tiers.sub_group import MASTER, MOMENTUM
from tencache_ds.tiers.update import publish

BETA_POWERS = "adam_beta_powers"
"""Key of a ZeRO-3 optimizer checkpoint that stock DeepSpeed neither writes nor reads."""


def hook_loading(engine_class: Any) -> None:
    """Lets frozen weights in the weight tier be loaded, and a void step end with a load; engines without TenCache's
    optimizer stay as they are."""
    stock_load = engine_class.load_checkpoint

    @functools.wraps(stock_load)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.optimizer, CheckpointMixin):
            return stock_load(self, *args, **kwargs)
        asked = inspect.signature(stock_load).bind(self, *args, **kwargs).arguments
        whole = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        BackgroundSave.wait_for_all()
        agree_on_checkpoint(self, asked["load_dir"], asked.get("tag"))
        with self.optimizer.loading_together(whole=whole):
            return stock_load(self, *args, **kwargs)

    engine_class.load_checkpoint = load_checkpoint
    stock = engine_class.load_module_state_dict

    @functools.wraps(stock)
    def load_module_state_dict(self: Any, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        optimizer, fragments = self.optimizer, checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if not isinstance(optimizer, CheckpointMixin):
            return stock(self, checkpoint, *args, **kwargs)
        n_saved, files = checkpoint.get("dp_world_size"), optimizer.saved_files
        if fragments and files is not None and n_saved not in (None, dist.get_world_size(optimizer.dp_process_group)):
            fragments = files.frozen(optimizer.frozen_numels(self.param_names), n_saved)
        with optimizer.loading():
            if kwargs.get("fetch_z3_params") or kwargs.get("custom_load_fn"):
                optimizer.step_guard.begin_change()  # the weights themselves are loaded
            if not fragments:
                return stock(self, checkpoint, *args, **kwargs)
            result = stock(self, {**checkpoint, FROZEN_PARAM_FRAGMENTS: None}, *args, **kwargs)
            optimizer.load_frozen(fragments, self.param_names)
            return result

    engine_class.load_module_state_dict = load_module_state_dict
    hook_resharding(engine_class, CheckpointMixin)


class CheckpointMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's checkpoint methods for :class:`TenCacheZeroOptimizer_Stage3`."""

    _load_passed: Callable[[], None] | None = None
    _kept_gathered: Sequence[tuple[Any, torch.Tensor]] = ()
    """Persistent weights and their values, while a checkpoint is saved."""
    saved_files: SavedFiles | None = None
    """The files of the checkpoint that was loaded last, or is being loaded."""
    defers_state = False
    """Whether ``state_dict()`` stands in for stored state with :class:`DeferredTensor`, while a checkpoint is saved."""
    defers_whole_state = False
    """Whether it does so for whole state in host memory, too: then an update may be under way."""
    save_under_way: BackgroundSave | None = None
    """The last checkpoint that was to be completed in the background."""
    save_votes: JobVotes | None = None
    """Of the ranks, for these."""

    @contextlib.contextmanager
    def loading_together(self, *, whole: bool) -> Iterator[None]:
        """Around DeepSpeed's load of a checkpoint. Collective, and so is its end: a rank that could not load its part
        is known to the others before they go on.

        Args:
            whole: optimizer states are loaded, too.

        Raises:
            VoidStepError: the last step is void, and this load would leave it so.
        """
        guard = self.step_guard
        with guard.together("the beginning of a load"):
            if not whole:
                self._finish_step()
        with self.loading(), guard.together("the end of a load") as self._load_passed:
            try:
                yield
            finally:
                self._load_passed = None

    def checkpoint_event_prologue(self) -> None:
        if self._load_passed is None:
            with self.step_guard.together("the beginning of a save"):
                self._finish_step()
            self._kept_gathered = [
                (param, param.data)
                for param in self.persistent_parameters
                if param.ds_status is ZeroParamStatus.AVAILABLE
            ]
        super().checkpoint_event_prologue()
        self._get_param_coordinator().hide_unused()

    def checkpoint_event_epilogue(self) -> None:
        """DeepSpeed's, which gathers the weights that always are, once every rank has saved or loaded its part."""
        if self._load_passed is not None:
            self._load_passed()
        kept, self._kept_gathered = self._kept_gathered, ()
        for param, values in kept:  # a save changes none
            param.data, param.ds_status = values, ZeroParamStatus.AVAILABLE
        self._gather_persistent()
        super().checkpoint_event_epilogue()

    # Saving

    def _rigid_state_dict(self) -> dict[str, Any]:
        if self._state is None:
            return super()._rigid_state_dict()
        self._finish_step()
        saved = super()._rigid_state_dict()
        packed = saved[OPTIMIZER_STATE_DICT]
        states = {key: dict(value) for key, value in packed["state"].items()}
        masters: dict[int, Any] = {}
        # torch numbers parameters in the order of their groups.
        order = sorted(range(len(self.fp16_groups)), key=lambda index: self.sub_group_to_group_id[index])
        for number, index in enumerate(order):
            values = self._saved_state(index)
            masters[index] = values.pop(MASTER)
            if values:
                states[number] = optimizer_states.nested(self.optimizer, states.get(number, {}) | values)
        saved[OPTIMIZER_STATE_DICT] = packed | {"state": states}
        saved[FP32_FLAT_GROUPS] = [masters[index] for index in range(len(masters))]
        if self._updater.beta_powers is not None:
            saved[BETA_POWERS] = self._updater.beta_powers.state_dict()
        return saved

    def _saved_state(self, index: int) -> dict[str, Any]:
        """A sub-group's state as a checkpoint takes it: deferred or in place while one is saved, else copies."""
        kinds = (MASTER, *self._optimizer_states.kinds(index))
        whole = self._state.whole(index)
        apart: dict[str, Any] = {}
        if self._momentum is not None and self._momentum.begun(index):
            momentum = self._momentum
            apart[MOMENTUM] = (
                DeferredTensor(StateKey(index, MOMENTUM), momentum.dtype(index), momentum.numel(index))
                if self.defers_state
                else momentum.whole(index)
            )
        if not self.defers_state or (whole and not self.defers_whole_state):
            values = self._state.borrow(index)
            if whole and not self.defers_state:
                values = {kind: value.clone() for kind, value in values.items()}
            return apart | {kind: values[kind].detach().requires_grad_(kind == MASTER) for kind in kinds}
        return apart | {
            kind: DeferredTensor(
                StateKey(index, kind),
                self._state.dtype(index, kind),
                self._state.numel(index, kind),
                requires_grad=kind == MASTER,
            )
            for kind in kinds
        }

    def scan_state(self, visit: Visit) -> None:
        """Shows all of the optimizer state once, see :meth:`OptimizerStateTier.scan`, and Muon's momentum."""
        self._finish_step()
        self._scan(visit)

    def _scan(self, visit: Visit) -> None:
        if self._state is not None:
            self._state.scan(lambda chunk, views: visit(chunk.sub_group, views))
        if self._momentum is not None:
            self._momentum.scan(visit)

    def run_in_background(self, job: Callable[[Callable[[Visit], None]], None]) -> None:
        """Runs what scans the optimizer state, in the background where an update may run there, too: whatever needs
        the state next waits for it."""
        if self._chunked_step is None:
            job(self._scan)
        else:
            self._chunked_step.run_in_background(functools.partial(job, self._scan))

    def finish_save(self) -> None:
        """Returns when the last checkpoint is complete.

        Raises:
            StorageError, TenCacheError: it is not there, and nobody was told so far.
        """
        if self.save_under_way is not None:
            self.save_under_way.finish()

    def frozen_in_tier(self) -> list[Any]:
        """The parameters that the optimizer does not update and whose shards are in the weight tier."""
        return [param for param in self._frozen() if in_tier(param)]

    def _frozen(self) -> list[Any]:
        """The parameters that the optimizer does not update."""
        updated = {param.ds_id for group in self.fp16_groups for param in group}
        return [param for param in self.module.parameters() if param.ds_id not in updated]

    # Loading

    def frozen_numels(self, names: Mapping[Any, str]) -> dict[str, int]:
        """Elements of each parameter that the optimizer does not update, by its name."""
        return {names[param]: param.ds_numel for param in self._frozen()}

    def load_frozen(self, fragments: Mapping[str, torch.Tensor], names: Mapping[Any, str]) -> None:
        """Puts the frozen weights' saved shards where the weights live.

        Args:
            fragments: this rank's shards by the parameters' names, 1-D.
            names: the name of each parameter.

        Raises:
            CheckpointError: a shard is missing, or was saved with another number of ranks.
        """
        frozen = {param.ds_id for param in self.frozen_in_tier()}
        shards = []
        for param in self._frozen():
            saved, numel = fragments.get(names[param]), param.ds_tensor.ds_numel
            if saved is None or saved.numel() != numel:
                problem = "is missing" if saved is None else f"has {saved.numel()} elements, the model's {numel}"
                raise CheckpointError(
                    f"this rank's part of the frozen weight {names[param]} {problem}: the checkpoint was saved with "
                    "a different number of ranks, or from a different model"
                )
            shards.append((param, saved.detach()))
        self.step_guard.begin_change(Part.FROZEN)
        for param, shard in shards:
            if param.ds_id in frozen and param.nvme_swapper.stored(param):
                param.nvme_swapper.replace(param, shard)
            else:
                param.ds_tensor.data.copy_(shard)
        self.step_guard.replaced(Part.FROZEN)

    @property
    def _keeps_stock_memory(self) -> bool:
        """Whether weights and master weights are where DeepSpeed's own loading puts them."""
        return self._state is None and all(flat is not None for flat in self.fp16_partitioned_groups_flat)

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        self._finish_step()
        masters = state_dict[FP32_FLAT_GROUPS]
        if not self._keeps_stock_memory:
            self._check_same_shape(masters)
        self.step_guard.begin_change()
        if self._keeps_stock_memory:
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)
            self._loaded(with_state=load_optimizer_states)
            return
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        if load_optimizer_states:
            self._set_fp32_optimizer_param_groups()
            self.optimizer.load_state_dict(state_dict[OPTIMIZER_STATE_DICT])
            self._clear_fp32_optimizer_param_groups()
            self._resume_adam(state_dict)
        for index, master in enumerate(masters):
            self._replace_master(index, master.detach(), with_state=load_optimizer_states)
        self._loaded(with_state=load_optimizer_states)

    def _loaded(self, *, with_state: bool) -> None:
        """All master weights and, where it is so, all optimizer states are those of a checkpoint."""
        if with_state:
            self.step_guard.replaced(Part.TRAINED)

    def _restore_from_bit16_weights(self) -> None:
        with self.loading():
            self._finish_step()
            self.step_guard.begin_change()
            if self._keeps_stock_memory:
                super()._restore_from_bit16_weights()
                return
            self._drop_staged_weights()
            for index in range(len(self.fp16_groups)):
                self._copy_weights_to_master(index)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str, *args: Any) -> None:
        """Loads a universal checkpoint's master weights and optimizer states."""
        require(Feature.UNIVERSAL)
        self._finish_step()
        self.step_guard.begin_change()
        if self._keeps_stock_memory:
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir, *args)
            self._loaded(with_state=True)
            return
        path = os.path.join(checkpoint_dir, "zero", "optimizer_state.pt")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is missing: {checkpoint_dir} is not a universal checkpoint")
        saved = torch.load(path, weights_only=False)
        self._load_global_state_stage3(saved)
        step = saved[OPTIMIZER_STATE_DICT]["state"][0]["step"]
        for index in range(len(self.fp16_groups)):
            state = self.optimizer.state[self.fp32_partitioned_groups_flat[index]] = {}
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = self._universal_state(checkpoint_dir, index, kind)
            state["step"] = step
            self._replace_master(index, self._universal_state(checkpoint_dir, index, "fp32"), with_state=True)
        for group in self.optimizer.param_groups:
            for key, value in saved[OPTIMIZER_STATE_DICT]["param_groups"][0].items():
                group[key] = [] if key == "params" else value
        self._resume_adam(saved)
        self._loaded(with_state=True)

    def _resume_adam(self, saved: Mapping[str, Any]) -> None:
        """Adam's powers of its betas, once states and hyper-parameters are loaded."""
        if self._updater is not None:
            groups = [self.optimizer.param_groups[self.sub_group_to_group_id[i]] for i in range(len(self.fp16_groups))]
            self._updater.resume(saved.get(BETA_POWERS), groups)

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(
        self, checkpoint_dir: str, load_from_fp32_weights: bool
    ) -> None:
        """Loads a universal checkpoint's weights; optimizer states stay as they are.

        Args:
            checkpoint_dir: its folder.
            load_from_fp32_weights: whether master weights are the saved ones, or follow from the rounded weights.
        """
        require(Feature.UNIVERSAL)
        self._finish_step()
        self.step_guard.begin_change()
        if self._keeps_stock_memory:
            super().load_module_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir, load_from_fp32_weights)
            return
        for index, params in enumerate(self.fp16_groups):
            master = self._universal_state(checkpoint_dir, index, "fp32")
            if not load_from_fp32_weights:
                master = master.to(params[0].ds_tensor.dtype)
            self._replace_master(index, master, with_state=False)

    def _universal_state(self, checkpoint_dir: str, index: int, kind: str) -> torch.Tensor:
        """This rank's partition of one kind of a sub-group's state, from a universal checkpoint."""
        master = self.fp32_partitioned_groups_flat[index]
        folder = os.path.join(checkpoint_dir, "zero")
        pieces = [
            self.universal_state(os.path.join(folder, self.name_of(param)), kind, param)
            for param in self.fp16_groups[index]
        ]
        return torch.cat([piece.reshape(-1) for piece in pieces]).to(master.device, master.dtype)

    def _replace_master(self, index: int, master: torch.Tensor, *, with_state: bool) -> None:
        """Puts loaded master weights (and the states the optimizer holds for them) into the tier, then the weights."""
        self._finish_step()
        self._drop_staged_weights()
        if self._state is None:
            self.fp32_partitioned_groups_flat[index].data.copy_(master)
            self._partitioned_params_swap_out(index)
            return
        if with_state and self._momentum is not None:
            self._momentum.replace(index, self.optimizer.state.get(self.fp32_partitioned_groups_flat[index], {}))
        self._optimizer_states.replace(index, master, with_state=with_state)
        for chunk in self._state.chunks(index):
            publish(self._model_weights, chunk, master[chunk.start : chunk.start + chunk.numel])
            self._state.split(chunk)

    def _check_same_shape(self, masters: list[torch.Tensor]) -> None:
        saved = [master.numel() for master in masters]
        here = [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]
        if saved != here:
            raise TenCacheError(
                f"the checkpoint's sub-groups hold {saved} elements on this rank, the model's {here}: it was saved "
                'with a different "sub_group_size", number of ranks or set of trainable parameters'
            )
