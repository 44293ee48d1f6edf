# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of one DeepSpeed engine, as DeepSpeed's constructor asks for them: tiers, staging memory, the
update, and what is kept in GPU memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError, MemoryLimitError, built
from tencache_ds.integration.activation_hooks import ActivationHooks
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.integration.agreement import Agreement, Post, agree_on_weights, agreed, difference, failing_together
from tencache_ds.integration.chunk_update import CpuAdam, SubGroupUpdater, chunk_arithmetic
from tencache_ds.integration.chunked_step import ChunkedStep
from tencache_ds.integration.engine_building import on_cuda, session_for
from tencache_ds.integration.hooked_modules import shard_nbytes
from tencache_ds.integration.known_engines import engines_for
from tencache_ds.integration.model_weights import GatheredWeights, ModelWeights, SharedWeights, cast_shard, in_tier
from tencache_ds.integration.muon import BUFFERED_TURNS
from tencache_ds.integration.optimizer_states import EightBitAdam, OptimizerStates, known_kinds
from tencache_ds.integration.param_swapper import ParamSwapper
from tencache_ds.integration.reporting import announce
from tencache_ds.memory.arena import empty_pinned_cache
from tencache_ds.memory.device_memory import CudaMemory, DeviceMemory
from tencache_ds.observability.counters import Stall
from tencache_ds.placement.gpu_homes import GpuHomes, initial_gpu_nbytes, open_device
from tencache_ds.placement.gpu_policy import limit_nbytes
from tencache_ds.placement.host_homes import HostHomes
from tencache_ds.placement.moves import GpuMoves, Shard, StateMoves
from tencache_ds.placement.places import GpuUsage
from tencache_ds.planning.budget import OutsideNeeds, OwnShard
from tencache_ds.planning.chunks import GRADIENT_BUFFER_NUMEL, gradient_cuts
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.profiling.host import available_nbytes
from tencache_ds.profiling.waits import FetchRecorder
from tencache_ds.runtime.session import Session
from tencache_ds.tensors import empty
from tencache_ds.tiers.device_update import TritonAdam
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.gradients import GradientSegment, GradientTier
from tencache_ds.tiers.momentum import Momentum
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.split_master import SplitMasters
from tencache_ds.tiers.sub_group import MASTER, Kinds

# What DeepSpeed and its optimizer add to a rank's memory


TEMPORARIES = 3
"""Tensors as long as the master weights that torch's own optimizers make in a step, beside the gradient."""


def outside_needs(
    module: torch.nn.Module,
    options: TenCacheConfig,
    *,
    pinned: bool,
    movable: Sequence[Shard] = (),
    memory: DeviceMemory | None = None,
    groups: Sequence[Sequence[Any]] = (),
    later_state: int = 0,
    update: int = 0,
) -> OutsideNeeds:
    """What is needed beside TenCache's tiers.

    Args:
        module: the model.
        options: of the user.
        pinned: DeepSpeed's ``pin_memory`` option, on a GPU.
        movable: the shards that may go to GPU memory.
        memory: of the compute device; None where nothing of TenCache's lives there.
        groups: the parameters of each sub-group.
        later_state: see :class:`OutsideNeeds`.
        update: see :class:`OutsideNeeds`.
    """
    updated = {param.ds_id for param in itertools.chain.from_iterable(groups)}
    params: Iterable[Any] = module.parameters()
    shards = [
        OwnShard(shard_nbytes(param), param.ds_id in updated)
        for param in params
        if not in_tier(param) and param.ds_tensor.device.type == "cpu"
    ]
    gpu_limit = None
    if memory is not None:
        usage = memory.usage()
        wanted = limit_nbytes(usage, options.gpu_memory)
        gpu_limit = usage.available_nbytes + usage.allocated_nbytes if wanted is None else wanted
    return OutsideNeeds(
        own_shards=shards,
        own_shards_pinned=pinned,
        later_state=later_state,
        update=update,
        gpu_weights=sum(shard.nbytes for shard in movable),
        gpu_limit=gpu_limit,
    )


def update_needs(
    optimizer: Any, state: OptimizerStateTier, numels: Sequence[int], *, in_chunks: int | None
) -> tuple[int, int]:
    """Host memory for states that an optimizer makes in its first step, and for an update, in bytes. States of an
    optimizer that is not known here are not foreseen.

    Args:
        optimizer: the torch optimizer.
        state: of it.
        numels: elements of each sub-group.
        in_chunks: what an update of one chunk needs, in chunks; None where it is updated a sub-group at a time.
    """
    if in_chunks is not None:
        return 0, in_chunks * max(state.chunk_nbytes, default=0)
    later, update = 0, 0
    for index, numel in enumerate(numels):
        dtype = state.dtype(index, state.kinds(index)[0])
        new = [dtype.itemsize for kind, dtype in known_kinds(optimizer, dtype) if kind not in state.kinds(index)]
        later += numel * sum(new)
        borrowed = 0 if state.whole(index) else sum(state.dtype(index, kind).itemsize for kind in state.kinds(index))
        update = max(update, numel * (borrowed + (1 + TEMPORARIES) * dtype.itemsize))
    return later, update


# What is kept in GPU memory


logger = logging.getLogger("DeepSpeed.tencache")

LEFT_TO_OTHERS_NBYTES = 2**30
"""Host memory, per rank, that state leaves to all others when it has to leave GPU memory within an allocation."""


def open_gpu(session: Session, fused: FusedAdam | None) -> tuple[DeviceMemory, TritonAdam] | None:
    """GPU memory for weights, gradients and state, where the updates of all ranks know how to use it. Every rank of the
    job calls it, also one that has no use for it.

    Args:
        session: of the engine.
        fused: Adam in one pass on the host; None where there is none, or another optimizer.
    """
    opened = None
    if fused is not None and session.options.gpu_memory != 0:
        try:
            opened = open_device(session.surroundings.on_cuda, fused)
        except ConfigError as error:
            logger.warning("GPU memory is not used: %s", error)
    # Later they decide together what goes there: one that cannot, or may not, would be waited for.
    used = Agreement.of_job().reach("whether GPU memory is used", opened is not None, _all_use_it)
    return opened if used else None


def _all_use_it(ranks: Sequence[Post]) -> bool:
    values = [bool(rank.value) for rank in ranks]
    if any(values) and not all(values):
        logger.warning("GPU memory is not used: %s", difference("whether they can and may use it", values, ranks))
    return all(values)


def open_memory(options: TenCacheConfig) -> DeviceMemory | None:
    """GPU memory for the weights of an engine without optimizer; None without a GPU, or if it is not to be used."""
    return None if options.gpu_memory == 0 or not on_cuda() else _open_cuda()


def _open_cuda() -> CudaMemory:
    return CudaMemory(torch.device("cuda", torch.cuda.current_device()), torch.Tensor.copy_)


def open_usage() -> Callable[[], GpuUsage] | None:
    """Tells the usage of GPU memory; None without a GPU."""
    memory = _open_cuda() if on_cuda() else None
    return None if memory is None else memory.usage


def build_gpu_homes(
    session: Session,
    memory: DeviceMemory,
    state: StateMoves,
    gradients: GradientTier,
    weights: GatheredWeights,
    groups: Sequence[Sequence[Any]],
    *,
    moved_gradient: Callable[[int, torch.Tensor], None],
    momentum: Momentum | None,
    hidden_share: Callable[[], float],
    record_fetches: Callable[[FetchRecorder | None], None],
) -> GpuHomes:
    """Decides what of an engine lives in GPU memory, and moves it.

    Args:
        session: of the engine.
        memory: of the compute device.
        state: moves the optimizer's state.
        gradients: the accumulated gradients.
        weights: of the model.
        groups: the parameters of each sub-group.
        moved_gradient: see :class:`GpuMoves`.
        momentum: see :class:`GpuMoves`.
        hidden_share: see :class:`GpuHomes`.
        record_fetches: see :class:`GpuHomes`.
    """
    moves = GpuMoves(
        memory,
        state,
        gradients,
        [[(param.ds_id, param.partition_numel()) for param in group] for group in groups],
        weights,
        session,
        moved_gradient=moved_gradient,
        momentum=momentum,
    )

    def say(placement: str, predicted_seconds: float | None) -> None:
        session.note_placement(placement, predicted_seconds)
        announce(f"TenCache: {placement}", session.options)

    session.await_placement()
    return GpuHomes(
        session.options,
        memory,
        state.tier,
        len(groups),
        weights.shards,
        moves,
        host_left_nbytes=lambda: session.host_left_nbytes,
        host_room_nbytes=lambda: available_nbytes() // session.surroundings.local_ranks - LEFT_TO_OTHERS_NBYTES,
        hidden_share=hidden_share,
        without_fetches=weights.stay_gathered,
        update_waits=lambda: session.counters.stalled_seconds(Stall.UPDATE),
        agree=agreed,
        record_fetches=record_fetches,
        say=say,
        activations=session.competing_activations,
    )


# The engine


GRADIENT_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""DeepSpeed's attribute: the accumulated gradient of each parameter."""


class BuildingMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's methods for :class:`TenCacheZeroOptimizer_Stage3`, whose constructor calls them.

    The attributes are None until they are built, and where an engine has no such part.
    """

    swap_optimizer: bool
    tencache: Session | None = None
    activation_hooks: ActivationHooks | None = None
    _state: OptimizerStateTier | None = None
    _gradients: GradientTier | None = None
    _optimizer_states: OptimizerStates | None = None
    _momentum: Momentum | None = None
    _updater: SubGroupUpdater | None = None
    _gpu_homes: GpuHomes | None = None

    @property
    def gpu_homes(self) -> GpuHomes | None:
        """What decides about its data in GPU memory; None where there is none."""
        return self._gpu_homes

    _gathered: GatheredWeights | None = None
    _host_homes: HostHomes | None = None
    _state_moves: StateMoves | None = None
    _device: tuple[DeviceMemory, TritonAdam] | None = None
    _model_weights: ModelWeights | None = None
    _arithmetic: CpuAdam | EightBitAdam | None = None
    _fused: FusedAdam | None = None
    _shared_weights: SharedWeights | None = None
    _chunked_step: ChunkedStep | None = None

    def _configure_offloading(self, offload_optimizer_config: Any, offload_param_config: Any) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        self._optimizer_on_nvme, self.swap_optimizer = self.swap_optimizer, False
        engines = engines_for(self.parameter_offload.module)
        if engines and not self.params_in_nvme_and_cpu:
            raise ConfigError(
                'this model was created with "offload_param": {"device": "nvme"}, which the config for '
                'deepspeed.initialize lacks: give both the same "offload_param" section'
            )
        self.tencache = session_for(engines, self._deepspeed_engine()._config, self._tencache_options)
        agree_on_weights(self.tencache.all(), self.parameter_offload.module)
        hooks, device = ActivationHooks(), torch.device(get_accelerator().current_device_name())
        moves = self.tencache.build_activations(
            device,
            hooks.is_weight,
            usage=open_usage(),
            releasable_nbytes=lambda: 0 if self._gpu_homes is None else self._gpu_homes.releasable_nbytes,
            say=lambda text: announce(f"TenCache: {text}", self._tencache_options),
        )
        if moves:
            hooks.use(built(self.tencache.activations).saved)
            self.activation_hooks = hooks

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        groups = self.trainable_param_groups
        if self.params_in_nvme_and_cpu:
            self._require_claims()
            # The weight tier decides which weights stay in host memory: no sub-group gets a flat buffer of DeepSpeed's,
            # which would give every trained weight the dtype of the first one.
            for param in itertools.chain.from_iterable(group["params"] for group in groups):
                cast_shard(param, self.dtype)
            self.param_groups_fp16_flat_cpu_memory = [empty(0, self.dtype) for _ in groups]
            return
        numels = [sum(param.partition_numel() for param in group["params"]) for group in groups]
        try:
            memory = [self._require_engine().weight_memory(numel, self.dtype) for numel in numels]
        except MemoryLimitError as error:
            logger.warning("weights in host memory are pinned by torch, which takes up to twice their size: %s", error)
            super()._create_param_groups_fp16_flat_cpu_memory()
            return
        self.param_groups_fp16_flat_cpu_memory = memory

    def _create_fp32_partitions(self) -> None:
        engine = self._require_engine()
        empty_pinned_cache()  # of the shards that were moved into flat buffers
        for part in engine.claimed:
            part.weights.set_trainable(param.ds_id for group in self.fp16_groups for param in group)
        self._model_weights = ModelWeights(
            self.fp16_groups,
            self.fp16_partitioned_groups_flat,
            self.fp16_partitioned_groups,
            engine.counters,
            self._get_param_coordinator().order_gathers,
        )
        if not self.offload_optimizer:
            engine.build_staging([])
            super()._create_fp32_partitions()
            return
        dtype = self.master_weights_and_grads_dtype
        arithmetic = self._arithmetic
        numels = [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]
        scales: Kinds = () if arithmetic is None else arithmetic.scales
        others: list[Kinds] = [() for _ in numels]  # in host memory the optimizer's own tensors become the state
        if arithmetic is not None:
            others = [arithmetic.kinds(index, dtype) for index in range(len(numels))]
        elif self._optimizer_on_nvme:
            others = [known_kinds(self.optimizer, dtype) for _ in numels]
        kinds: list[Kinds] = [((MASTER, dtype), *each) for each in others]
        gradient_nbytes = sum(numels) * self.gradient_accumulation_dtype.itemsize
        matrices = {i: self.fp16_groups[i] for i, uses_muon in enumerate(self._sub_groups_using_muon()) if uses_muon}
        gpu_nbytes = 0
        if self._device is not None:
            gpu_nbytes = initial_gpu_nbytes(self._device[0].usage(), self._tencache_options.gpu_memory)
        cuts = self._gradient_cuts()
        masters = self._split_masters()
        with failing_together("the places of optimizer state"):  # no rank takes space before every rank has looked
            momentum, momentum_nbytes, stored_momentum = engine.state.plan_momentum(
                [[param.partition_numel() for param in group] for group in matrices.values()],
                self.communication_data_type,
                gradient_nbytes,
            )
            specs, chunk_nbytes = engine.state.plan(
                numels,
                kinds,
                gradient_nbytes + momentum_nbytes,
                scales=scales,
                by_chunks=arithmetic is not None,
                masters=masters,
                gpu_nbytes=gpu_nbytes,
                visible=self._model_weights.persistent() if self._tencache_options.overlap_step else None,
                cuts=cuts,
            )
            stored_nbytes = sum(chunk_nbytes) + sum(stored_momentum)
            engine.state.check_space(stored_nbytes)
        memory = None if self._device is None else self._device[0]
        self._state = engine.state.build(specs, stored_nbytes, memory, masters)
        if self._shared_weights is not None:
            self._shared_weights.begin(self._state)
        engine.build_staging(chunk_nbytes, self._momentum_buffers(stored_momentum))
        self.subgroup_to_device = dict.fromkeys(range(len(specs)), "cpu")
        accelerator: Any = get_accelerator()
        with ThreadPoolExecutor(
            1, "tencache-gradients", accelerator.set_device, (accelerator.current_device(),)
        ) as beside:
            # Their memory is zeroed and registered while the disk writes.
            gradients = beside.submit(self._build_gradients, engine, cuts)
            for index, ids in enumerate(self.fp16_partitioned_groups_flat_id):
                placeholder: Any = empty(0, dtype)
                placeholder.ds_id = f"{ids[0]}_{ids[-1]}"
                placeholder.requires_grad = True
                self.fp32_partitioned_groups_flat.append(placeholder)
                self._copy_weights_to_master(index, fresh=True)
        self._gradients = gradients.result()
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []
        self._optimizer_states = OptimizerStates(
            self.optimizer,
            self._state,
            self.fp32_partitioned_groups_flat,
            needed=None if arithmetic is None else arithmetic.needed,
            shared={} if arithmetic is None else arithmetic.shared_states(),
        )
        if matrices:
            keys = {index: [param.ds_id for param in group] for index, group in matrices.items()}
            self._momentum = Momentum(engine.build_momentum(momentum), keys)

    def _momentum_buffers(self, stored_nbytes: Sequence[int]) -> SizeClass | None:
        """The buffers for momentum on NVMe; None where there is none.

        Args:
            stored_nbytes: bytes of each matrix's there.
        """
        if not stored_nbytes:
            return None
        n_ranks = max(
            dist.get_world_size(group=self._get_sub_group_process_group(i)) for i in range(len(self.fp16_groups))
        )
        return SizeClass(max(stored_nbytes), min(BUFFERED_TURNS * n_ranks, len(stored_nbytes)))

    def _sub_groups_using_muon(self) -> list[bool]:
        """Whether each sub-group has Muon's matrices; empty with any other optimizer."""
        return list(self.sub_groups_using_muon) if getattr(self, "use_muon", False) else []

    def _uses_gpu_memory(self, arithmetic: CpuAdam | EightBitAdam | None) -> bool:
        """Whether weights may be kept in GPU memory, and state whose update there is known. With 8-bit Adam, whose
        state stays in RAM, only weights could go there: where the user asks for it, and no master weights are split
        over those in RAM."""
        if isinstance(arithmetic, EightBitAdam):
            return self._tencache_options.gpu_memory is not None and not self._tencache_options.split_master
        return arithmetic is not None

    def _split_masters(self) -> SplitMasters | None:
        """Splits master weights on NVMe, and in host memory where no state goes to GPU memory, whose kernels take whole
        ones; None where they stay whole."""
        in_memory = self._device is None
        if self._fused is None or not self._tencache_options.split_master or any(self._sub_groups_using_muon()):
            return None
        if not (in_memory or self._optimizer_on_nvme):
            return None
        self._shared_weights = SharedWeights(self.fp16_groups, built(self._model_weights), self._finish_step)
        return SplitMasters(self._fused, self._shared_weights, in_memory=in_memory)

    def initialize_optimizer_states(self) -> None:
        """Nothing to pass over: chunks were written once, with their moments at zero."""
        if self._state is None:
            super().initialize_optimizer_states()

    def _setup_for_real_optimizer(self) -> None:
        if not self.offload_optimizer:
            super()._setup_for_real_optimizer()
            return
        engine = self._require_engine()
        numels = [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]
        arithmetic = chunk_arithmetic(
            self.optimizer, numels, self.master_weights_and_grads_dtype, self._sub_groups_using_muon()
        )
        self._arithmetic = arithmetic
        self._fused = fused = None if arithmetic is None else engine.fused_adam(arithmetic.one_pass)
        self._device = open_gpu(engine, fused if self._uses_gpu_memory(arithmetic) else None)
        self._create_fp32_partitions()
        self._create_next_swappable_fp32_groups()
        self.initialize_optimizer_states()
        dist.barrier()
        if self.contiguous_gradients:
            self.allocate_buckets(self.reduce_bucket_size)
        state, gradients, weights = built(self._state), built(self._gradients), built(self._model_weights)
        optimizer_states = built(self._optimizer_states)
        self._updater = SubGroupUpdater(
            self.optimizer,
            state,
            optimizer_states,
            gradients,
            weights,
            cores=engine.surroundings.cores,
            arithmetic=arithmetic,
            fused=fused,
            device=self._device,
        )
        self._chunked_step = ChunkedStep(
            self.optimizer,
            self.fp16_groups,
            engine,
            state,
            gradients,
            weights,
            self._updater.by_chunks,
            self.step_guard,
            overlaps=self._updater.one_pass_states if self._tencache_options.overlap_step else (),
        )
        moves = self._state_moves = StateMoves(
            state,
            len(self.fp16_groups),
            engine,
            open_store=engine.state.open_store,
            before=self._chunked_step.finish,
            moved=optimizer_states.show,
        )
        self._host_homes = engine.watch_host_memory(moves)
        if self._device is not None:
            self._gathered = GatheredWeights(list(self.module.parameters()), weights, may_stay=self.host_path.hooks)
            self._gpu_homes = build_gpu_homes(
                engine,
                self._device[0],
                moves,
                gradients,
                self._gathered,
                self.fp16_groups,
                moved_gradient=getattr(self, GRADIENT_PARTITIONS).__setitem__,
                momentum=self._momentum,
                hidden_share=self._chunked_step.hidden_share,
                record_fetches=self._get_param_coordinator().record_fetches,
            )
        starts = itertools.accumulate((int(n) for n in self.fp16_partitioned_groups_flat_numel), initial=0)
        self._sub_group_starts = list(starts)

    def _plan_peak(self) -> None:
        engine, later_state, update = built(self.tencache), 0, 0
        if self._state is not None:
            numels = [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]
            in_chunks = None
            if self._arithmetic is not None:
                in_chunks = self._arithmetic.temporaries_in_chunks if self._fused is None else 0
            later_state, update = update_needs(self.optimizer, self._state, numels, in_chunks=in_chunks)
        engine.plan_peak(
            outside_needs(
                self.module,
                engine.options,
                pinned=engine.surroundings.on_cuda and self.offload_param_pin_memory,
                movable=() if self._gathered is None else self._gathered.shards(),
                memory=None if self._device is None else self._device[0],
                groups=self.fp16_groups,
                later_state=later_state,
                update=update,
            )
        )

    def _gradient_cuts(self) -> list[list[int]]:
        """Elements of each sub-group where another buffer of gradients begins: where gradients may move to GPU memory,
        theirs in host memory becomes free buffer by buffer."""
        if self._device is None:
            return [[] for _ in self.fp16_groups]
        return [
            gradient_cuts([param.partition_numel() for param in group], GRADIENT_BUFFER_NUMEL)
            for group in self.fp16_groups
        ]

    def _build_gradients(self, engine: Session, cuts: Sequence[Sequence[int]]) -> GradientTier:
        buffers: list[list[GradientSegment]] = []
        start = 0
        for group, cuts_here in zip(self.fp16_groups, cuts, strict=True):
            starts = {start, *(start + cut for cut in cuts_here)}
            for param in group:
                if start in starts:
                    buffers.append([])
                    starts.remove(start)  # a weight without elements here begins where the next one does
                buffers[-1].append(GradientSegment(param.ds_id, start, param.partition_numel()))
                start += param.partition_numel()
        dtype = self.gradient_accumulation_dtype
        gradients = GradientTier(buffers, dtype, engine.gradient_memory, engine.counters)
        keys = [segment.key for segment in itertools.chain.from_iterable(buffers)]
        setattr(self, GRADIENT_PARTITIONS, {key: gradients.segment(key) for key in keys})
        self.grad_partitions_flat_buffer = empty(0, dtype)  # DeepSpeed asks where it is
        return gradients

    def create_reduce_and_remove_grad_hooks(self) -> None:
        # A post-accumulate hook needs the parameter, not its value: stored weights are not read for it.
        stored = [
            param
            for param in itertools.chain.from_iterable(self.fp16_groups)
            if isinstance(param.nvme_swapper, ParamSwapper) and hasattr(param, "register_post_accumulate_grad_hook")
        ]
        gathers = [param.all_gather for param in stored]
        for param in stored:
            param.all_gather = _no_gather
            param.data = param.data.to(param.ds_tensor.dtype)  # which it shows after a gather
        try:
            super().create_reduce_and_remove_grad_hooks()
        finally:
            for param, gather in zip(stored, gathers, strict=True):
                param.all_gather = gather


def _no_gather(*args: Any, **kwargs: Any) -> None:
    """Stands in for a parameter's ``all_gather`` where its value is not needed."""
