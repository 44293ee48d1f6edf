# SPDX-License-Identifier: Apache-2.0
"""Every place of DeepSpeed that TenCache plugs into, with the signature it was tested with.

All of them are verified before anything is replaced: a mismatch is an error that names the seam and the version,
never a half-patched run.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from tencache_ds.errors import SeamError

logger = logging.getLogger("DeepSpeed.tencache")

TESTED_VERSIONS = ("0.19.8",)
SUPPORTED_VERSIONS = ">=0.19.8,<0.20"
"""The range that the package declares; a test compares the two."""

_RUNTIME = "deepspeed.runtime"
_PARAMETERS = f"{_RUNTIME}.zero.partition_parameters"
_COORDINATOR = f"{_RUNTIME}.zero.partitioned_param_coordinator"
_STAGE3 = f"{_RUNTIME}.zero.stage3"
_TORCH_CHECKPOINTS = f"{_RUNTIME}.checkpoint_engine.torch_checkpoint_engine"


@dataclass(frozen=True, slots=True)
class Seam:
    """One point where TenCache meets DeepSpeed.

    Attributes:
        module: dotted module name.
        path: attribute path within the module.
        parameters: parameter names in order (``self`` included), or None when only existence matters.
        uses: name-mangled attributes that the function's code must mention, because we read or set them too.
        purpose: TenCache's use of it.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None
    purpose: str
    uses: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Dotted name for messages."""
        return f"{self.module}.{self.path}"

    def resolve(self) -> Any:
        """The object at this seam.

        Raises:
            SeamError: it does not exist.
        """
        target: Any = importlib.import_module(self.module)
        for part in self.path.split("."):
            if not hasattr(target, part):
                raise SeamError(_mismatch(self, f"it has no {part!r}"))
            target = inspect.getattr_static(target, part) if isinstance(target, type) else getattr(target, part)
        return target


SEAMS: tuple[Seam, ...] = (
    Seam(f"{_RUNTIME}.config", "DeepSpeedConfig._initialize_params", ("self", "param_dict"), "reads the config keys"),
    Seam(
        f"{_RUNTIME}.engine",
        "DeepSpeedEngine._configure_basic_optimizer",
        ("self", "model_parameters"),
        "defers loading of the CPU Adam op",
    ),
    Seam("deepspeed.ops.adam.cpu_adam", "CPUAdamBuilder", None, "defers loading of the CPU Adam op"),
    Seam(
        f"{_RUNTIME}.engine",
        "DeepSpeedEngine._configure_zero_optimizer",
        ("self", "optimizer"),
        "selects the stage-3 optimizer and coordinator classes for one engine",
    ),
    Seam(f"{_RUNTIME}.engine", "DeepSpeedEngine.forward", ("self", "inputs", "kwargs"), "moves activations"),
    Seam(
        f"{_RUNTIME}.engine",
        "DeepSpeedEngine.backward",
        ("self", "loss", "retain_graph", "scale_wrt_gas"),
        "advises when GPU memory runs out",
    ),
    *(
        Seam(f"{_RUNTIME}.engine", f"DeepSpeedEngine.{name}", ("self", "lr_kwargs"), "knows a step from end to end")
        for name in ("step", "_take_model_step")
    ),
    Seam(f"{_RUNTIME}.engine", "DeepSpeedEngine.managed_gradient_accumulation", ("self",), "places figures of a step"),
    *(
        Seam(f"{_RUNTIME}.activation_checkpointing.checkpointing", name, parameters, "moves checkpointed inputs")
        for name, parameters in (
            ("_get_cpu_offload_engine", ()),
            ("get_offloaded_activations_for_backward", ("args", "engine")),
            ("restore_offloaded_activations", ("tensors", "engine")),
            ("CPU_CHECKPOINT", None),
            ("PARTITION_ACTIVATIONS", None),
        )
    ),
    Seam(
        f"{_RUNTIME}.engine",
        "DeepSpeedEngine.save_checkpoint",
        ("self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
        "streams checkpoints, and completes them on all ranks or on none",
    ),
    *(
        Seam(f"{_RUNTIME}.engine", f"DeepSpeedEngine.{name}", ("self", *parameters), purpose)
        for name, parameters, purpose in (
            (
                "load_checkpoint",
                (
                    "load_dir",
                    "tag",
                    "load_module_strict",
                    "load_optimizer_states",
                    "load_lr_scheduler_states",
                    "load_module_only",
                    "custom_load_fn",
                ),
                "ends a void step",
            ),
            ("_save_checkpoint", ("save_dir", "tag", "client_state", "exclude_frozen_parameters"), "keeps its errors"),
            (
                "_save_moe_checkpoint",
                ("save_dir", "tag", "client_state", "exclude_frozen_parameters"),
                "keeps its errors",
            ),
            ("_save_zero_checkpoint", ("save_path", "tag"), "keeps its errors"),
            ("_get_param_fragment_func", ("param",), "gives it placeholders of frozen weights"),
            (
                "load_module_state_dict",
                (
                    "checkpoint",
                    "strict",
                    "custom_load_fn",
                    "fetch_z3_params",
                    "z3_params_to_fetch",
                    "allowed_missing_keys",
                ),
                "loads frozen weights through the weight tier",
            ),
        )
    ),
    *(
        Seam(
            f"{_RUNTIME}.checkpoint_engine.torch_checkpoint_engine",
            f"TorchCheckpointEngine.{name}",
            parameters,
            purpose,
        )
        for name, parameters, purpose in (
            ("__init__", ("self", "config_params"), "detects the format that DeepSpeed writes"),
            ("save", ("self", "state_dict", "path"), "writes the files instead"),
            ("commit", ("self", "info"), "makes all ranks agree"),
            ("makedirs", ("self", "path", "exist_ok"), "keeps its errors"),
        )
    ),
    Seam(
        _PARAMETERS,
        "AsyncPartitionedParameterSwapper.__init__",
        ("self", "ds_config", "model_dtype"),
        "replaces the weight swapper",
    ),
    Seam(
        _PARAMETERS,
        "Init._validate_remote_device",
        ("self", "remote_device", "ds_config"),
        "compares the ranks' configs before a model is partitioned",
    ),
    Seam(
        _PARAMETERS,
        "Init._partition_param",
        ("self", "param", "buffer", "has_been_updated", "free_data"),
        "provides the write buffer of an updated weight",
    ),
    Seam(_PARAMETERS, "Init._ensure_availability_of_partitioned_params", ("self", "params"), "waits for updates"),
    Seam(_PARAMETERS, "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", None, "tracks weights held by GatheredParameters"),
    Seam(_PARAMETERS, "GatheredParameters.__enter__", ("self",), "keeps the values of weights that may be changed"),
    Seam(_PARAMETERS, "GatheredParameters.__exit__", ("self", "exc"), "notices weights that were changed"),
    Seam(f"{_RUNTIME}.zero.parameter_offload", "PartitionedParameterCoordinator", None, "replaces the coordinator"),
    Seam(
        f"{_RUNTIME}.zero.parameter_offload",
        "DeepSpeedZeRoOffload._register_deepspeed_module",
        ("self", "module", "count"),
        "takes hooks off modules where they have nothing to do, and lighter ones in the places of others",
    ),
    Seam(f"{_RUNTIME}.zero.parameter_offload", "FWD_MODULE_STACK", None, "knows the modules that are in forward"),
    Seam(
        f"{_RUNTIME}.zero.linear",
        "LinearFunctionForZeroStage3.forward",
        ("input", "weight", "bias"),
        "computes linear layers where there are no gradients",
    ),
    Seam(
        _PARAMETERS,
        "zero3_linear_wrap",
        ("input", "weight", "bias"),
        "computes linear layers where there are no gradients",
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator._invalidate_trace",
        ("self",),
        "records the order of modules anew",
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator.__init__",
        (
            "self",
            "prefetch_bucket_sz",
            "max_reuse_distance_in_numel",
            "max_available_parameters_in_numel",
            "allgather_stream",
            "inflight_param_registry",
            "prefetch_nvme",
            "timers",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "fast_sharding_for_leaf_module",
            "log_trace_cache_warnings",
        ),
        "follows the order of accesses",
        (
            "_PartitionedParameterCoordinator__max_n_available_params",
            "_PartitionedParameterCoordinator__max_ongoing_fetch_events",
            "_PartitionedParameterCoordinator__n_available_params",
            "_PartitionedParameterCoordinator__param_order",
            "_PartitionedParameterCoordinator__param_queue",
            "_PartitionedParameterCoordinator__prefetch_bucket_sz",
            "_PartitionedParameterCoordinator__step_id",
            "_PartitionedParameterCoordinator__submodule_order",
            "_PartitionedParameterCoordinator__trace_mode",
        ),
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator.fetch_sub_module",
        ("self", "current_submodule", "forward"),
        "reads ahead, and reclaims staging buffers",
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator._fetch_sub_module_impl",
        ("self", "current_submodule", "forward", "is_leaf"),
        "gathers a module's weights",
        (
            "_PartitionedParameterCoordinator__active_backward_submodules",
            "_PartitionedParameterCoordinator__inflight_param_registry",
            "_PartitionedParameterCoordinator__most_recent_step_id_param_fetched_for",
            "_PartitionedParameterCoordinator__param_queue",
            "_PartitionedParameterCoordinator__step_id",
        ),
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator.release_sub_module",
        ("self", "submodule", "forward"),
        "releases a module's weights",
        (
            "_PartitionedParameterCoordinator__active_backward_submodules",
            "_PartitionedParameterCoordinator__params_to_release",
        ),
    ),
    *(
        Seam(_COORDINATOR, f"PartitionedParameterCoordinator.{name}", ("self", "sub_module"), "follows the modules")
        for name in ("trace_prologue", "record_module")
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator.reset_step",
        ("self",),
        "detects the start of a forward pass, and leaves modules without weights out of their order",
        ("_PartitionedParameterCoordinator__step_id_module_fetched_for",),
    ),
    Seam(_PARAMETERS, "free_param", ("param",), "releases a module's weights"),
    Seam(_PARAMETERS, "get_allgather_dtype", ("param", "param_ds_tensor"), "gathers the shards of several ranks"),
    Seam(_COORDINATOR, "iter_params", ("module", "recurse"), "releases all weights"),
    Seam(f"{_RUNTIME}.compiler", "compile", (), "leaves the compiler alone until Muon needs it"),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_",
        ("self", "params", "forward", "quantize"),
        "has streams wait for the gathers of one rank, instead of the host",
        (
            "_PartitionedParameterCoordinator__allgather_stream",
            "_PartitionedParameterCoordinator__inflight_param_registry",
        ),
    ),
    Seam(
        _COORDINATOR,
        "PartitionedParameterCoordinator.release_and_reset_all",
        ("self", "module"),
        "waits for the copies of shards before they are updated",
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer",
        ("self",),
        "allocates the gradient buffer exactly",
        ("_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",),
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.partition_grads",
        ("self", "params_to_release", "grad_partitions"),
        "accumulates gradients in host memory",
        ("_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",),
    ),
    Seam(_STAGE3, "DeepSpeedZeroOptimizer_Stage3._update_scale", ("self", "has_overflow"), "knows that a step begins"),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag",
        ("self",),
        "forgets the gradients of a backward pass that was interrupted",
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.zero_grad",
        ("self", "set_to_none"),
        "lets micro-steps begin anew",
    ),
    *(
        Seam(
            _STAGE3, f"DeepSpeedZeroOptimizer_Stage3.{name}", ("self", "param"), "accumulates gradients in host memory"
        )
        for name in ("_get_param_partition_group", "_get_param_partition_rank", "get_param_comm_dtype")
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket",
        ("self", "param"),
        "copies several gradients into their bucket at once",
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        ("self", "communication_data_type"),
        "copies several gradients into their bucket at once",
        ("_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",),
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._offload_grad_partition_at_boundary",
        ("self", "param", "grad_buffer", "offload_fp32_gradients", "offload_fp32_offsets"),
        "keeps only the norm of a finished gradient",
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._get_norm_groups",
        ("self",),
        "computes the norms of all gradients together",
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2",
        ("self", "input", "buffer_size"),
        "computes the norms of all gradients together",
    ),
    Seam(f"{_RUNTIME}.zero.utils", "get_norm_dtype", (), "computes the norms of all gradients together"),
    *(
        Seam(_STAGE3, f"DeepSpeedZeroOptimizer_Stage3.{name}", ("self", *parameters), purpose)
        for name, parameters, purpose in (
            ("_configure_offloading", ("offload_optimizer_config", "offload_param_config"), "takes over NVMe offload"),
            ("_create_param_groups_fp16_flat_cpu_memory", (), "keeps weights in memory of their exact size"),
            ("_create_fp32_partitions", (), "puts master weights into the optimizer tier"),
            ("initialize_optimizer_states", (), "avoids a pass over the state"),
            ("create_reduce_and_remove_grad_hooks", (), "installs hooks without reading the weights"),
            ("_prepare_sub_group", ("sub_group_id", "timer_names"), "streams chunks instead of sub-groups"),
            ("unscale_and_clip_grads", ("sub_group_id", "total_norm"), "unscales per chunk"),
            ("_optimizer_step", ("sub_group_id",), "updates chunk by chunk"),
            ("_reassign_or_swap_out_partitioned_parameters", ("sub_group_id",), "publishes weights per chunk"),
            ("_release_sub_group", ("sub_group_id", "timer_names"), "streams chunks instead of sub-groups"),
            ("_partitioned_params_swap_out", ("i",), "writes weights back through the weight tier"),
            ("has_overflow", ("partition_gradients",), "checks gradients without a copy of them"),
            ("step", ("closure",), "brackets the update"),
            ("backward_prologue", (), "marks the start of a backward pass in traces"),
            ("backward_epilogue", (), "marks its end"),
            ("reduce_ready_partitions_and_remove_grads", ("param",), "looks at memory in a backward pass"),
            ("_partition_all_parameters", (), "keeps weights in GPU memory gathered"),
            ("_post_step", ("timer_names",), "lets ranks agree on an update, and gathers persistent weights at once"),
            ("_get_fp32_grad_state_partition", ("param", "release_swap_buffers"), "reads gradients"),
            ("set_fp32_grad_for_param", ("value", "param"), "replaces gradients"),
            ("set_local_grad_for_param", ("value", "param"), "replaces gradients"),
            ("update_fp32_grad_for_param_vectorized", ("update_func", "param_list"), "replaces gradients"),
            ("get_fp32_grad_partitions", (), "reads gradients"),
            ("_get_fp32_opt_state_partition", ("param", "release_swap_buffers", "optim_state_key"), "reads state"),
            ("set_full_hp_param", ("value", "param", "optim_state_key"), "writes state"),
            ("set_local_hp_param", ("value", "param", "optim_state_key"), "writes state"),
            ("_rigid_state_dict", (), "saves what CPU offload would save"),
            ("_rigid_load_state_dict", ("state_dict", "load_optimizer_states"), "loads what CPU offload saved"),
            ("_restore_from_bit16_weights", (), "refreshes master weights"),
            ("load_hp_checkpoint_state_from_checkpoint_dir_stage3", ("checkpoint_dir",), "loads universal checkpoints"),
            (
                "load_module_checkpoint_state_from_checkpoint_dir_stage3",
                ("checkpoint_dir", "load_from_fp32_weights"),
                "loads the weights of universal checkpoints",
            ),
            ("load_hp_checkpoint_state", ("folder", "key", "param"), "reads universal checkpoints"),
            ("checkpoint_event_prologue", (), "reclaims unused weights"),
            ("checkpoint_event_epilogue", (), "gathers weights in GPU memory again"),
            ("destroy", (), "closes the engine"),
        )
    ),
)


def warn_of_version(version: str, rank: int) -> None:
    """Says on rank 0 that a DeepSpeed is not one of those that TenCache declares, though every seam is as expected."""
    try:
        is_supported = SpecifierSet(SUPPORTED_VERSIONS).contains(version, prereleases=True)
    except InvalidVersion:
        is_supported = False
    if not is_supported and rank == 0:
        logger.warning(
            "DeepSpeed %s is outside the range that TenCache is tested with (%s). All signatures that it "
            "depends on are as expected, but the code behind them may have changed, and the results of training with "
            "it: install deepspeed==%s, or first compare some steps with those of DeepSpeed's own CPU offload.",
            version,
            SUPPORTED_VERSIONS,
            TESTED_VERSIONS[-1],
        )


def verify_seams() -> None:
    """Checks every seam against the installed DeepSpeed, before anything is replaced.

    Raises:
        SeamError: a seam is missing or has another signature; names it and the version.
    """
    for seam in SEAMS:
        target = _undecorated(seam.resolve())
        if seam.parameters is not None:
            parameters = tuple(inspect.signature(target).parameters)
            if parameters != seam.parameters:
                raise SeamError(_mismatch(seam, f"its parameters are {parameters}, expected {seam.parameters}"))
        for name in seam.uses:
            if name not in _names(target):
                raise SeamError(_mismatch(seam, f"it does not use {name!r}"))


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


def _mismatch(seam: Seam, what: str) -> str:
    import deepspeed

    return (
        f"DeepSpeed {deepspeed.__version__} differs at {seam.name} ({seam.purpose}): {what}. TenCache was tested with "
        f"DeepSpeed {', '.join(TESTED_VERSIONS)}: install that version, or remove "
        '"offload_engine": "tencache" from the DeepSpeed config to run without TenCache.'
    )
