# SPDX-License-Identifier: Apache-2.0
"""Every place of DeepSpeed that TenCache plugs into: its signature in the newest version, and who needs it.

All of them are verified before anything is imported that depends on them, or replaced. One that differs is an error
that names the seam and the version, never a half-patched run; or its feature stays with DeepSpeed, if training is right
without it. Seams of the newest version that an older one gets from :mod:`.adapters` are not asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tencache_ds.errors import SeamError
from tencache_ds.integration.adapters.versions import (
    OLDEST,
    SUPPORTED,
    TESTED,
    changes_after,
    is_supported,
    nearest,
    precedes,
)

logger = logging.getLogger("DeepSpeed.tencache")


class Feature(Enum):
    """A feature of TenCache, or a part of its host path.

    Values: what the log says is left to DeepSpeed where the feature is off, None if there is no training without it and
    empty if a user would not notice; and its group in reports.
    """

    TRAINING = None, "training"
    RANKS = None, "several ranks"
    CHECKPOINTS = None, "checkpoints"
    UNIVERSAL = "universal checkpoints", "universal checkpoints"
    ACTIVATIONS = "inputs of its own activation checkpointing", "activations"
    LINEAR = "linear layers in inference", "host path"
    FETCHES = "fetches and releases of modules", "host path"
    GATHERS = "gathers of several ranks", "host path"
    BUCKETS = "buckets of gradients", "host path"
    HOOKS = "hooks on modules", "host path"
    NORMS = "norms of gradients", "host path"
    MUON = "", "host path"
    MUON_UPDATES = "", "the optimizer Muon"

    @property
    def group(self) -> str:
        """Its group in reports."""
        return self.value[1]

    @property
    def essential(self) -> bool:
        """Whether there is no training without the feature."""
        return self.value[0] is None


@dataclass(frozen=True, slots=True)
class Seam:
    """One point where TenCache meets DeepSpeed.

    Attributes:
        module: dotted module name.
        signature: attribute path within the module, and its parameters in order if they matter; ``...`` at their end
            where further ones are passed on as they come.
        feature: of TenCache that needs it.
        purpose: TenCache's use of it.
        uses: private attributes that the function's code must mention, because they are read or set here too.
        on_demand: looked at only where the feature is asked for, because its module takes seconds to import.
    """

    module: str
    signature: str
    feature: Feature
    purpose: str
    uses: tuple[str, ...] = ()
    on_demand: bool = False

    @property
    def path(self) -> str:
        """The attribute path."""
        return self.signature.partition("(")[0]

    @property
    def name(self) -> str:
        """Dotted name for messages."""
        return f"{self.module}.{self.path}"

    def mismatch(self) -> str:
        """How the installed DeepSpeed differs here; empty if it does not."""
        try:
            target: Any = importlib.import_module(self.module)
        except ModuleNotFoundError:
            return "there is no such module"
        for part in self.path.split("."):
            target = inspect.unwrap(target)  # once TenCache is active, some are its own around DeepSpeed's
            if not hasattr(target, part):
                return f"it has no {part!r}"
            target = inspect.getattr_static(target, part) if isinstance(target, type) else getattr(target, part)
        if "(" in self.signature:
            target = _undecorated(target)
            found = tuple(inspect.signature(target).parameters)
            listed = self.signature.partition("(")[2].rstrip(")")
            expected = tuple(name.strip() for name in listed.split(",") if name.strip())
            passed_on = expected[-1:] == ("...",)
            if (found[: len(expected) - 1] != expected[:-1]) if passed_on else (found != expected):
                return f"its parameters are {found}, expected {expected}"
        for name in self.uses:
            if name not in _names(target):
                return f"it does not use {name!r}"
        return ""


def _private(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"_{owner}__{name}" for name in names)


def _seams(module: str, feature: Feature, *entries: tuple[Any, ...], within: str = "") -> tuple[Seam, ...]:
    """Seams of one module, or of one class of it, from ``(signature, purpose)`` or ``(signature, purpose, uses)``."""
    prefix = f"{within}." if within else ""
    return tuple(Seam(f"deepspeed.{module}", prefix + entry[0], feature, *entry[1:]) for entry in entries)


_COORDINATOR, _STAGE3 = "PartitionedParameterCoordinator", "DeepSpeedZeroOptimizer_Stage3"
_in_coordinator = functools.partial(_seams, "runtime.zero.partitioned_param_coordinator", within=_COORDINATOR)
_in_stage3 = functools.partial(_seams, "runtime.zero.stage3", within=_STAGE3)
_in_engine = functools.partial(_seams, "runtime.engine", within="DeepSpeedEngine")
_PARAMETERS = "runtime.zero.partition_parameters"
_READ = "is read"

SEAMS: tuple[Seam, ...] = (
    *_seams("accelerator", Feature.TRAINING, ("get_accelerator()", "computes where DeepSpeed does")),
    *_seams("utils", Feature.TRAINING, ("logger", _READ)),
    *_seams(
        "utils.debug", Feature.TRAINING, ("debug_clear_module_and_param_names()", "releases a model with its engine")
    ),
    *_seams(
        "runtime.config",
        Feature.TRAINING,
        ("DeepSpeedConfig._initialize_params(self, param_dict)", "reads the config keys"),
    ),
    *_in_engine(
        Feature.TRAINING,
        ("_configure_basic_optimizer(self, model_parameters)", "defers loading of the CPU Adam op"),
        ("_configure_zero_optimizer(self, optimizer)", "selects the classes of one engine"),
        ("forward(self, inputs, kwargs)", "moves activations"),
        ("backward(self, ...)", "advises when GPU memory runs out"),
        ("step(self, ...)", "knows a step from end to end"),
        ("_take_model_step(self, ...)", "knows a step from end to end"),
        ("managed_gradient_accumulation(self)", "places figures of a step"),
        ("offload_states(self, include, device, ...)", "hands GPU memory back"),
        ("reload_states(self, non_blocking)", "takes GPU memory again"),
    ),
    *_in_engine(
        Feature.CHECKPOINTS,
        (
            "save_checkpoint(self, save_dir, tag, client_state, save_latest, ...)",
            "streams checkpoints, and completes them on all ranks or on none",
        ),
        (
            "load_checkpoint(self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
            "load_module_only, ...)",
            "ends a void step",
        ),
        ("_get_all_ckpt_names(self, checkpoints_path, tag)", "loads checkpoints of another number of ranks"),
        ("_load_zero_checkpoint(self, load_dir, tag, ...)", "loads checkpoints of another number of ranks"),
        ("_get_ckpt_name(self, checkpoints_path, tag, mp_placeholder, ...)", "finds the files of all ranks"),
        ("_get_all_zero_checkpoint_names(self, load_dir, tag, bf16_mode)", "finds the files of all ranks"),
        ("_get_all_zero_checkpoints(self, load_dir, tag)", "gives a rank its part of them"),
        ("_save_checkpoint(self, ...)", "keeps its errors"),
        ("_save_moe_checkpoint(self, ...)", "keeps its errors"),
        ("_save_zero_checkpoint(self, ...)", "keeps its errors"),
        ("_copy_recovery_script(self, save_path)", "writes the scripts in the background"),
        ("_get_param_fragment_func(self, param)", "gives it placeholders of frozen weights"),
        (
            "load_module_state_dict(self, checkpoint, strict, custom_load_fn, fetch_z3_params, ...)",
            "loads frozen weights through the weight tier",
        ),
    ),
    *_seams(
        "checkpoint.constants",
        Feature.CHECKPOINTS,
        *((name, _READ) for name in ("FP32_FLAT_GROUPS", "FROZEN_PARAM_FRAGMENTS", "LOSS_SCALER")),
        ("OPTIMIZER_STATE_DICT", _READ),
    ),
    *_seams(
        "runtime.checkpoint_engine.torch_checkpoint_engine",
        Feature.CHECKPOINTS,
        ("__init__(self, config_params)", "detects the format that DeepSpeed writes"),
        ("save(self, state_dict, path)", "writes the files instead"),
        ("commit(self, ...)", "makes all ranks agree"),
        ("makedirs(self, path, exist_ok)", "keeps its errors"),
        within="TorchCheckpointEngine",
    ),
    *_seams("ops.adam", Feature.TRAINING, ("DeepSpeedCPUAdam", "is updated by chunks")),
    *_seams("ops.adam.cpu_adam", Feature.TRAINING, ("CPUAdamBuilder", "defers loading of the CPU Adam op")),
    *_seams("ops.adagrad", Feature.TRAINING, ("DeepSpeedCPUAdagrad", "knows its states")),
    *_seams("ops.lion", Feature.TRAINING, ("DeepSpeedCPULion", "knows its states")),
    *_seams(
        "runtime.activation_checkpointing.checkpointing",
        Feature.ACTIVATIONS,
        ("_get_cpu_offload_engine()", "moves checkpointed inputs"),
        ("get_offloaded_activations_for_backward(args, engine)", "moves checkpointed inputs"),
        ("restore_offloaded_activations(tensors, engine)", "moves checkpointed inputs"),
        ("CPU_CHECKPOINT", "moves checkpointed inputs"),
        ("PARTITION_ACTIVATIONS", "moves checkpointed inputs"),
    ),
    *_seams(
        "runtime.swap_tensor.constants",
        Feature.TRAINING,
        *((f"AIO{name}", _READ) for name in ("", "_BLOCK_SIZE", "_INTRA_OP_PARALLELISM", "_OVERLAP_EVENTS")),
        *((f"AIO_{name}", _READ) for name in ("QUEUE_DEPTH", "SINGLE_SUBMIT", "USE_GDS")),
    ),
    *_seams("runtime.swap_tensor.aio_config", Feature.TRAINING, ("get_aio_config(param_dict)", "reads the section")),
    *_seams(
        "runtime.swap_tensor.partitioned_param_swapper",
        Feature.TRAINING,
        ("PartitionedParamStatus.NOT_AVAILABLE", "says where shards are"),
    ),
    *_seams(
        "runtime.zero.offload_config",
        Feature.TRAINING,
        ("OffloadDeviceEnum.nvme", _READ),
        ("OffloadStateTypeEnum.contiguous_grad_buffer", _READ),
    ),
    *_seams(
        _PARAMETERS,
        Feature.TRAINING,
        ("AsyncPartitionedParameterSwapper.__init__(self, ds_config, model_dtype)", "replaces the weight swapper"),
        (
            "Init._partition_param(self, param, buffer, has_been_updated, ...)",
            "provides the write buffer of an updated weight",
        ),
        ("Init._ensure_availability_of_partitioned_params(self, params)", "waits for updates"),
        (
            "Init._allgather_params_coalesced(self, param_list, hierarchy, quantize)",
            "gathers several parameters whole on a CPU",
        ),
        ("DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", "releases what a failed GatheredParameters has gathered"),
        ("GatheredParameters.__enter__(self)", "keeps the values of weights that may be changed"),
        ("GatheredParameters.__exit__(self, exc)", "notices weights that were changed"),
        ("ZeroParamStatus.INFLIGHT", _READ),
        ("free_param(param)", "releases a module's weights"),
    ),
    *_seams(
        _PARAMETERS,
        Feature.RANKS,
        ("Init._validate_remote_device(self, remote_device, ds_config)", "compares the ranks' configs"),
    ),
    *_seams(
        _PARAMETERS,
        Feature.GATHERS,
        ("get_allgather_dtype(param, param_ds_tensor)", "gathers the shards of several ranks"),
        ("NoGatherHandle", "has streams wait instead of the host"),
        ("NoGatherCoalescedHandle", "has streams wait instead of the host"),
    ),
    *_seams(
        "runtime.zero.linear",
        Feature.LINEAR,
        ("LinearFunctionForZeroStage3.forward(input, weight, bias)", "computes linear layers without gradients"),
    ),
    *_seams(
        _PARAMETERS,
        Feature.LINEAR,
        ("zero3_linear_wrap(input, weight, bias)", "computes linear layers without gradients"),
    ),
    *_seams(
        "runtime.zero.parameter_offload",
        Feature.TRAINING,
        ("PartitionedParameterCoordinator", "replaces the coordinator"),
        ("FWD_MODULE_STACK", "knows the modules that are in forward"),
    ),
    *_seams(
        "runtime.zero.parameter_offload",
        Feature.HOOKS,
        (
            "DeepSpeedZeRoOffload._register_deepspeed_module(self, module, count)",
            "puts lighter hooks on modules, or none where they have nothing to do",
        ),
        ("ZeROOrderedDict.__getitem__(self, key)", "waits where a weight is looked up that stays gathered"),
    ),
    *_seams("runtime.zero.linear", Feature.HOOKS, ("LinearFunctionForZeroStage3.forward", "is called quickly")),
    *_seams("runtime.zero.utils", Feature.HOOKS, ("apply_to_tensors_only(function, value, ...)", "looks into outputs")),
    *_in_coordinator(
        Feature.TRAINING,
        (
            "__init__(self, prefetch_bucket_sz, max_reuse_distance_in_numel, max_available_parameters_in_numel, "
            "allgather_stream, inflight_param_registry, prefetch_nvme, ...)",
            "follows the order of accesses",
            _private(
                _COORDINATOR, "allgather_stream", "inflight_param_registry", "max_n_available_params",
                "max_ongoing_fetch_events", "n_available_params", "param_order", "param_queue", "prefetch_bucket_sz",
                "step_id", "submodule_order", "trace_mode",
            ),
        ),
        ("_invalidate_trace(self)", "records the order of modules anew"),
        ("fetch_sub_module(self, current_submodule, forward)", "reads ahead, and reclaims staging buffers"),
        ("trace_prologue(self, sub_module)", "follows the modules"),
        ("record_module(self, sub_module)", "follows the modules"),
        (
            "reset_step(self)",
            "detects the start of a forward pass, and leaves modules without weights out of their order",
            _private(_COORDINATOR, "step_id_module_fetched_for"),
        ),
        (f"_{_COORDINATOR}__params_to_release", "releases a module's weights"),
        ("release_and_reset_all(self, module)", "waits for the copies of shards before they are updated"),
    ),
    *_seams(
        "runtime.zero.partitioned_param_coordinator",
        Feature.TRAINING,
        ("iter_params(module, recurse)", "knows a module's weights"),
    ),
    *_in_coordinator(
        Feature.GATHERS,
        (
            f"_{_COORDINATOR}__all_gather_params_(self, params, forward, quantize)",
            "has streams wait for gathers, instead of the host",
        ),
    ),
    *_in_coordinator(
        Feature.FETCHES,
        (
            "_fetch_sub_module_impl(self, current_submodule, forward, is_leaf)",
            "gathers a module's weights",
            _private(
                _COORDINATOR, "active_backward_submodules", "inflight_param_registry",
                "most_recent_step_id_param_fetched_for", "param_queue", "step_id",
            ),
        ),
        (
            "release_sub_module(self, submodule, forward)",
            "releases a module's weights",
            _private(_COORDINATOR, "active_backward_submodules", "params_to_release"),
        ),
    ),
    *_seams("runtime.compiler", Feature.MUON, ("compile()", "leaves the compiler alone until Muon needs it")),
    *_in_stage3(
        Feature.TRAINING,
        *(
            (signature, purpose, _private(_STAGE3, "param_id_to_grad_partition"))
            for signature, purpose in (
                ("_setup_for_real_optimizer(self)", "allocates the gradient buffer exactly"),
                (
                    "partition_grads(self, params_to_release, grad_partitions)",
                    "accumulates gradients in host memory",
                ),
            )
        ),
        ("_update_scale(self, has_overflow)", "knows that a step begins"),
        ("clear_backward_seen_flag(self)", "forgets the gradients of a backward pass that was interrupted"),
        ("zero_grad(self, set_to_none)", "lets micro-steps begin anew"),
        ("_get_param_partition_group(self, param)", "accumulates gradients in host memory"),
        ("_get_param_partition_rank(self, param)", "accumulates gradients in host memory"),
        (
            "_offload_grad_partition_at_boundary(self, param, grad_buffer, offload_fp32_gradients, "
            "offload_fp32_offsets)",
            "keeps only the norm of a finished gradient",
        ),
        ("_get_norm_groups(self)", "computes the norms of all gradients together"),
        ("_constant_buffered_norm2(self, input, buffer_size)", "computes the norms of all gradients together"),
        ("_configure_offloading(self, offload_optimizer_config, offload_param_config)", "takes over NVMe offload"),
        ("_create_param_groups_fp16_flat_cpu_memory(self)", "keeps weights in memory of their exact size"),
        ("_create_fp32_partitions(self)", "puts master weights into the optimizer tier"),
        ("initialize_optimizer_states(self)", "avoids a pass over the state"),
        ("create_reduce_and_remove_grad_hooks(self)", "installs hooks without reading the weights"),
        ("_prepare_sub_group(self, sub_group_id, timer_names)", "streams chunks instead of sub-groups"),
        ("unscale_and_clip_grads(self, sub_group_id, total_norm)", "unscales per chunk"),
        ("_optimizer_step(self, sub_group_id)", "updates chunk by chunk"),
        ("_reassign_or_swap_out_partitioned_parameters(self, sub_group_id)", "publishes weights per chunk"),
        ("_release_sub_group(self, sub_group_id, timer_names)", "streams chunks instead of sub-groups"),
        ("_partitioned_params_swap_out(self, i)", "writes weights back through the weight tier"),
        ("has_overflow(self, partition_gradients)", "checks gradients without a copy of them"),
        ("step(self, ...)", "brackets the update"),
        ("backward_prologue(self)", "marks the start of a backward pass"),
        ("backward_epilogue(self)", "marks its end"),
        ("independent_gradient_partition_epilogue(self)", "knows the end of a backward pass"),
        ("_partition_all_parameters(self)", "keeps weights in GPU memory gathered"),
        ("_post_step(self, ...)", "lets ranks agree on an update, and gathers persistent weights at once"),
        ("_get_fp32_grad_state_partition(self, param, release_swap_buffers)", "reads gradients"),
        ("set_fp32_grad_for_param(self, value, param)", "replaces gradients"),
        ("set_local_grad_for_param(self, value, param)", "replaces gradients"),
        ("update_fp32_grad_for_param_vectorized(self, update_func, param_list)", "replaces gradients"),
        ("get_fp32_grad_partitions(self)", "reads gradients"),
        ("_get_fp32_opt_state_partition(self, param, release_swap_buffers, optim_state_key)", "reads state"),
        ("set_full_hp_param(self, value, param, optim_state_key)", "writes state"),
        ("set_local_hp_param(self, value, param, optim_state_key)", "writes state"),
        ("destroy(self)", "closes the engine"),
    ),
    *_in_stage3(
        Feature.MUON_UPDATES,
        (
            "_apply_muon_updates_cpu_offload(self)",
            "orthogonalizes gradients after the last micro-step",
            ("norm_for_param_grads", "sub_group_to_group_id"),
        ),
    ),
    Seam(
        "deepspeed.runtime.zero.muon.original_muon",
        "muon_update(grad, momentum, beta, ns_steps, nesterov, ns_method, is_expert_group, num_heads)",
        Feature.MUON_UPDATES,
        "orthogonalizes gradients",
        on_demand=True,
    ),
    *_seams("runtime.zero.utils", Feature.NORMS, ("get_norm_dtype()", "computes norms as DeepSpeed does")),
    *_in_stage3(
        Feature.BUCKETS,
        ("get_param_comm_dtype(self, param)", "finds a gradient's bucket"),
        (f"_{_STAGE3}__add_grad_to_ipg_bucket(self, param)", "copies several gradients into their bucket at once"),
        (
            f"_{_STAGE3}__reduce_and_partition_ipg_grads(self, communication_data_type)",
            "copies several gradients into their bucket at once",
            _private(_STAGE3, "avg_scatter_grads"),
        ),
    ),
    *_in_stage3(
        Feature.CHECKPOINTS,
        ("_rigid_state_dict(self)", "saves what CPU offload would save"),
        ("_rigid_load_state_dict(self, state_dict, load_optimizer_states)", "loads what CPU offload saved"),
        ("_restore_from_bit16_weights(self)", "refreshes master weights"),
        ("checkpoint_event_prologue(self)", "reclaims unused weights"),
        ("checkpoint_event_epilogue(self)", "gathers weights in GPU memory again"),
    ),
    *_in_stage3(
        Feature.UNIVERSAL,
        ("load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir, ...)", "loads them"),
        (
            "load_module_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir, load_from_fp32_weights)",
            "loads their weights",
        ),
        ("load_hp_checkpoint_state(self, folder, key, param)", "reads them"),
        ("_load_global_state_stage3(self, sd)", "loads their scalars"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A seam that the installed DeepSpeed does not have as it is needed."""

    seam: Seam
    problem: str


def mismatches(version: str, seams: Iterable[Seam] = SEAMS) -> tuple[Mismatch, ...]:
    """Where the installed DeepSpeed differs.

    Args:
        version: of it.
        seams: to look at, but for those that this version gets from its adapters.
    """
    adapted = frozenset().union(*(change.lacks for change in changes_after(version)))
    found = ((seam, seam.mismatch()) for seam in seams if seam.name not in adapted)
    return tuple(Mismatch(seam, problem) for seam, problem in found if problem)


@functools.cache
def _installed() -> tuple[Mismatch, ...]:
    return mismatches(deepspeed_version(), [seam for seam in SEAMS if not seam.on_demand])


def deepspeed_version() -> str:
    """The version of the installed DeepSpeed."""
    import deepspeed

    return str(deepspeed.__version__)


@functools.cache
def works(feature: Feature) -> bool:
    """Whether a feature that can be left to DeepSpeed has its seams in the installed one."""
    return all(mismatch.seam.feature is not feature for mismatch in _installed())


def left_to_deepspeed() -> tuple[str, ...]:
    """What the installed DeepSpeed does itself, for the log."""
    features = dict.fromkeys(mismatch.seam.feature for mismatch in _installed())
    return tuple(feature.value[0] for feature in features if feature.value[0])


def require(feature: Feature) -> None:
    """Called where a feature is asked for by name.

    Raises:
        SeamError: the installed DeepSpeed differs where it plugs in.
    """
    on_demand = mismatches(deepspeed_version(), [seam for seam in SEAMS if seam.on_demand and seam.feature is feature])
    for mismatch in (*_installed(), *on_demand):
        if mismatch.seam.feature is feature:
            raise _error(mismatch)


def verify_seams() -> None:
    """Checks the installed DeepSpeed, before anything is imported that depends on its version.

    Raises:
        SeamError: it is older than the oldest supported one, or a seam that training needs is missing or has another
            signature; names it, the version and the nearest one that is tested.
    """
    version = deepspeed_version()
    if precedes(version, OLDEST):
        raise SeamError(f"DeepSpeed {version} is older than what TenCache works with ({SUPPORTED}). {_remedy(version)}")
    for mismatch in _installed():
        if mismatch.seam.feature.essential:
            raise _error(mismatch)


def _error(mismatch: Mismatch) -> SeamError:
    seam, version = mismatch.seam, deepspeed_version()
    return SeamError(
        f"DeepSpeed {version} differs at {seam.name}, which TenCache needs for {seam.feature.group} "
        f"({seam.purpose}): {mismatch.problem}. {_remedy(version)}"
    )


def _remedy(version: str) -> str:
    return (
        f"TenCache was tested with DeepSpeed {', '.join(TESTED)}: install the nearest one (pip install "
        f'deepspeed=={nearest(version)}), or remove "offload_engine": "tencache" from the DeepSpeed config to run '
        "without TenCache."
    )


def warn_of_version(version: str, rank: int) -> None:
    """Says on rank 0 that a DeepSpeed is not one of those that TenCache declares, though every seam is as expected."""
    if not is_supported(version) and rank == 0:
        logger.warning(
            "DeepSpeed %s is outside the range that TenCache is tested with (%s). All signatures that it "
            "depends on are as expected, but the code behind them may have changed, and the results of training with "
            "it: install deepspeed==%s, or first compare some steps with those of DeepSpeed's own CPU offload.",
            version,
            SUPPORTED,
            nearest(version),
        )


def _undecorated(target: Any) -> Any:
    """The function inside DeepSpeed's decorators, which do not always set ``__wrapped__``."""
    target = inspect.unwrap(target)
    while inspect.isfunction(target) and tuple(inspect.signature(target).parameters) == ("args", "kwargs"):
        inner = [cell.cell_contents for cell in target.__closure__ or () if inspect.isfunction(cell.cell_contents)]
        if len(inner) != 1:
            break
        target = inspect.unwrap(inner[0])
    return target


def _names(function: Callable[..., Any]) -> set[str]:
    code = function.__code__
    return {*code.co_names, *code.co_freevars, *code.co_varnames}
