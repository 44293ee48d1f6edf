# SPDX-License-Identifier: Apache-2.0
"""Activation: replaces DeepSpeed's functions once a config, observed by ``config_hook``, selects TenCache."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tencache_ds.integration.config_checks import REASON_ATTRIBUTE, UNUSED_ATTRIBUTE, options_of

if TYPE_CHECKING:
    from tencache_ds.config import TenCacheConfig
    from tencache_ds.runtime.session import Session

logger = logging.getLogger("DeepSpeed.tencache")

_HOOKED = "__tencache_hook__"
_NOTHING_TO_DO = (
    "it has no optimizer, and none of its weights may go to NVMe or to GPU memory, so DeepSpeed itself keeps them in "
    "memory"
)


def activate() -> None:
    """Installs TenCache's side of every seam, once they are verified. Idempotent.

    Each replacement looks at the config it is called with and leaves other engines in the process to DeepSpeed.
    """
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.runtime import engine as engine_module
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.zero import partition_parameters

    if hasattr(engine_module.DeepSpeedEngine._configure_zero_optimizer, _HOOKED):
        return
    from tencache_ds import host_path
    from tencache_ds.integration import inference, known_engines, optimizer_states
    from tencache_ds.integration.activation_hooks import hook_passes
    from tencache_ds.integration.adapters.installed import calls
    from tencache_ds.integration.agreement import agree_on_options, agree_on_switches
    from tencache_ds.integration.checkpoint import hook_loading
    from tencache_ds.integration.checkpoint_saving import hook_saving
    from tencache_ds.integration.chunk_update import loaded_when_needed
    from tencache_ds.integration.chunked_step import hook_stepping, wait_for_updates
    from tencache_ds.integration.coordinator import end_gathers_ahead, undone_after_error
    from tencache_ds.integration.hooked_modules import begin_user_gather, end_user_gather
    from tencache_ds.integration.model_weights import gathered, overwriting, released
    from tencache_ds.integration.param_swapper import ParamSwapper, begin_changes, end_changes, swapper_factory
    from tencache_ds.integration.release import hook_states
    from tencache_ds.integration.reporting import observatory
    from tencache_ds.integration.seams import warn_of_version

    warn_of_version(deepspeed.__version__, dist.get_rank() if dist.is_initialized() else 0)
    calls.complete_gathers(partition_parameters.Init)
    hook_saving(engine_module.DeepSpeedEngine)
    hook_loading(engine_module.DeepSpeedEngine)
    hook_stepping(engine_module.DeepSpeedEngine)
    hook_states(engine_module.DeepSpeedEngine)
    hook_passes(engine_module.DeepSpeedEngine, checkpointing)

    partition_parameters.AsyncPartitionedParameterSwapper = swapper_factory(
        partition_parameters.AsyncPartitionedParameterSwapper
    )

    partition_param = partition_parameters.Init._partition_param

    @functools.wraps(partition_param)
    def _partition_param(self: Any, param: Any, *args: Any, has_been_updated: bool = False, **kwargs: Any) -> Any:
        host_path.before_release(param)
        if not has_been_updated:
            return partition_param(self, param, *args, has_been_updated=has_been_updated, **kwargs)
        managed = isinstance(param.nvme_swapper, ParamSwapper)
        with (
            overwriting(param),
            param.nvme_swapper.overwriting(param) if managed else contextlib.nullcontext(),
        ):
            return partition_param(self, param, *args, has_been_updated=has_been_updated, **kwargs)

    partition_parameters.Init._partition_param = _partition_param

    enter, leave = partition_parameters.GatheredParameters.__enter__, partition_parameters.GatheredParameters.__exit__

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        if not self.enabled:
            return enter(self)
        wait_for_updates(self.params)  # also for those that are gathered
        end_gathers_ahead(self.params)
        host_path.before_user_gathers(self.params)
        with undone_after_error(self.params) as own:
            if self.src_rank is not None:
                begin_changes(own)
            result = enter(self)
            gathered(self.params)
        begin_user_gather(self.params)
        return result

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        try:
            with host_path.user_releases(self.params if self.enabled else ()):
                return leave(self, *error)
        finally:
            if self.enabled:
                end_user_gather(self.params)
                released(self.params)
                end_changes(self.params)

    partition_parameters.GatheredParameters.__enter__ = __enter__
    partition_parameters.GatheredParameters.__exit__ = __exit__

    ensure_availability = partition_parameters.Init._ensure_availability_of_partitioned_params

    @functools.wraps(ensure_availability)
    def _ensure_availability_of_partitioned_params(self: Any, params: Any) -> None:
        wait_for_updates(params)
        ensure_availability(self, params)

    partition_parameters.Init._ensure_availability_of_partitioned_params = _ensure_availability_of_partitioned_params

    validate = partition_parameters.Init._validate_remote_device

    @functools.wraps(validate)
    def _validate_remote_device(self: Any, remote_device: Any, ds_config: Any) -> None:
        validate(self, remote_device, ds_config)
        if options_of(ds_config) is not None:
            agree_on_options(ds_config)

    partition_parameters.Init._validate_remote_device = _validate_remote_device

    is_supported = engine_module.DeepSpeedEngine._is_supported_optimizer

    @functools.wraps(is_supported)
    def _is_supported_optimizer(self: Any, optimizer_name: str) -> Any:
        known = options_of(self._config) is not None and optimizer_states.class_named(optimizer_name) is not None
        return known or is_supported(self, optimizer_name)

    engine_module.DeepSpeedEngine._is_supported_optimizer = _is_supported_optimizer

    configure_basic = engine_module.DeepSpeedEngine._configure_basic_optimizer

    @functools.wraps(configure_basic)
    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        options = options_of(self._config)
        if options is None:
            return configure_basic(self, model_parameters)
        name = optimizer_states.class_named(self.optimizer_name())
        if name is not None:
            return optimizer_states.build(name, model_parameters, self.optimizer_params() or {})
        with loaded_when_needed(), host_path.building_optimizer(options):
            return configure_basic(self, model_parameters)

    engine_module.DeepSpeedEngine._configure_basic_optimizer = _configure_basic_optimizer

    configure = engine_module.DeepSpeedEngine._configure_zero_optimizer

    @functools.wraps(configure)
    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        options = options_of(self._config)
        if options is None:
            with _nothing_left_after_failure(self):
                _refuse_our_weights(self.module)
            configured = configure(self, optimizer)
            known_engines.note(self)
            return configured
        t_start_s = time.perf_counter()
        with _nothing_left_after_failure(self):
            agree_on_options(self._config)
            options = agree_on_switches(options)
            with _substituted_classes(self, options):
                configured = configure(self, optimizer)
            if not hasattr(configured, "tencache"):
                inference.complete(configured, self, options)
        if hasattr(configured, "tencache"):
            observatory.add(configured.tencache, self.module, configured)
            _announce(configured.tencache, self._config, time.perf_counter() - t_start_s)
        else:
            _announce_nothing_to_do(options)
        known_engines.note(self)
        return configured

    setattr(_configure_zero_optimizer, _HOOKED, True)
    engine_module.DeepSpeedEngine._configure_zero_optimizer = _configure_zero_optimizer


def _announce(session: Session, ds_config: Any, seconds: float) -> None:
    """The activation line (the placement, and the reason where the config does not select TenCache); and one with
    the keys of the config that have no effect with TenCache."""
    import deepspeed

    import tencache_ds
    from tencache_ds.integration.reporting import announce, announce_summary_at_end
    from tencache_ds.integration.seams import left_to_deepspeed

    reason, left = getattr(ds_config, REASON_ATTRIBUTE), ", ".join(left_to_deepspeed())
    switched_off = "" if session.options.host_path else ", with DeepSpeed's own host path"
    announce(
        f"TenCache {tencache_ds.__version__} is active with DeepSpeed {deepspeed.__version__}"
        f"{f', because {reason}' if reason else ''}: per rank {session.describe()}; "
        f"built in {seconds:.1f} s{switched_off}"
        f"{f'. Left to this version of DeepSpeed: {left}' if left else ''}",
        session.options,
    )
    unused = getattr(ds_config, UNUSED_ATTRIBUTE)
    if unused:
        announce(f"TenCache does not use {', '.join(unused)}: buffers follow the model", session.options)
    if session.optimizer_state is not None:
        announce_summary_at_end(session)


def _announce_nothing_to_do(options: TenCacheConfig) -> None:
    import tencache_ds
    from tencache_ds.integration.reporting import announce

    announce(f"TenCache {tencache_ds.__version__} is not in use for this engine: {_NOTHING_TO_DO}", options)


@contextlib.contextmanager
def _substituted_classes(engine: Any, options: Any) -> Iterator[None]:
    """DeepSpeed's stage-3 classes, replaced while one engine chooses its own; afterwards they are as before."""
    from deepspeed.runtime.zero import parameter_offload, stage3

    from tencache_ds.integration.adapters.installed import calls

    # Before the substitution: they subclass the stock optimizer when they are first imported.
    calls.import_optimizers()

    from tencache_ds.host_path import HostPath
    from tencache_ds.integration.coordinator import TenCacheCoordinator
    from tencache_ds.integration.stage3 import TenCacheZeroOptimizer_Stage3

    stock_optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    stock_coordinator = parameter_offload.PartitionedParameterCoordinator
    stage3.DeepSpeedZeroOptimizer_Stage3 = functools.partial(
        TenCacheZeroOptimizer_Stage3, tencache_options=options, deepspeed_engine=engine
    )
    parameter_offload.PartitionedParameterCoordinator = functools.partial(
        TenCacheCoordinator, host_path=HostPath.of(options, engine._config.zero_config)
    )
    try:
        yield
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = stock_optimizer
        parameter_offload.PartitionedParameterCoordinator = stock_coordinator


@contextlib.contextmanager
def _nothing_left_after_failure(engine: Any) -> Iterator[None]:
    """An engine that cannot be built leaves its model as it was: readable, to be dropped or initialized again."""
    from tencache_ds.integration.release import release_after_failure

    try:
        yield
    except BaseException:
        release_after_failure(engine)
        raise


def _refuse_our_weights(module: Any) -> None:
    """Stock DeepSpeed can do nothing with weights in TenCache's tiers."""
    from tencache_ds.errors import ConfigError
    from tencache_ds.integration.known_engines import swappers_of

    if swappers_of(module):
        raise ConfigError(
            'this model was made with "offload_engine": "tencache", which the config for deepspeed.initialize lacks: '
            "give both the same key"
        )


def engine_of(deepspeed_engine: Any) -> Session:
    """The TenCache session of a DeepSpeed engine.

    Raises:
        ValueError: it runs without TenCache.
    """
    engine = getattr(getattr(deepspeed_engine, "optimizer", None), "tencache", None)
    if engine is None:
        if options_of(getattr(deepspeed_engine, "_config", None)) is not None:
            raise ValueError(f"TenCache has no statistics of this DeepSpeed engine: {_NOTHING_TO_DO}")
        raise ValueError(
            'this DeepSpeed engine does not run with TenCache: its config has no "offload_engine": "tencache"'
        )
    return engine
