# SPDX-License-Identifier: Apache-2.0
"""Resumes a ZeRO-3 checkpoint on another number of ranks than it was saved by, from its own files.

Stock DeepSpeed asks for a conversion to a universal checkpoint. The files of all ranks together have the same elements,
however many ranks there were: each rank maps those that have a part of its partitions into memory, and copies what is
its own. Padding is zero, as in a model that was never saved. What was saved once per rank and is not a partition
(counts of steps, the loss scale) is the same on every rank; where a rank has no file of its own, it reads another's.
"""

from __future__ import annotations

import bisect
import copy
import functools
import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, FROZEN_PARAM_FRAGMENTS, OPTIMIZER_STATE_DICT

from tencache_ds.errors import CheckpointError
from tencache_ds.planning.resharding import Piece, partition_numel, pieces
from tencache_ds.tensors import zeros


def hook_resharding(engine_class: Any, trained: type[Any]) -> None:
    """Has engines with TenCache's optimizer load checkpoints of any number of ranks.

    Args:
        engine_class: ``DeepSpeedEngine``.
        trained: the class of these optimizers.
    """
    stock_names, stock_load = engine_class._get_all_ckpt_names, engine_class._load_zero_checkpoint

    @functools.wraps(stock_names)
    def _get_all_ckpt_names(self: Any, checkpoints_path: str, tag: str) -> list[str]:
        names = stock_names(self, checkpoints_path, tag)
        if isinstance(self.optimizer, trained) and not self.load_universal_checkpoint():
            self.optimizer.saved_files = files = SavedFiles(self, checkpoints_path, tag)
            names = names or files.of_another_rank()
        return list(names)

    @functools.wraps(stock_load)
    def _load_zero_checkpoint(self: Any, load_dir: str, tag: str, load_optimizer_states: bool = True) -> Any:
        n_saved = self.loaded_checkpoint_dp_world_size
        if (
            not isinstance(self.optimizer, trained)
            or self.load_universal_checkpoint()
            or not load_optimizer_states
            or n_saved == dist.get_world_size(group=self.optimizer.dp_process_group)
        ):
            return stock_load(self, load_dir, tag, load_optimizer_states)
        return _load_resharded(self, load_dir, tag, n_saved, stock_load)

    engine_class._get_all_ckpt_names, engine_class._load_zero_checkpoint = _get_all_ckpt_names, _load_zero_checkpoint


class SavedFiles:
    """The files of one checkpoint with what each rank has saved of the module: frozen weights.

    Args:
        engine: that loads them.
        folder: of the checkpoints.
        tag: of this one.
    """

    def __init__(self, engine: Any, folder: str, tag: str) -> None:
        group = engine.optimizer.dp_process_group
        self._rank, self._n_loading = dist.get_rank(group=group), dist.get_world_size(group=group)
        self._folder, self._name = os.path.split(engine._get_ckpt_name(folder, tag, mp_placeholder="*"))

    def of_another_rank(self) -> list[str]:
        """Those that this rank reads if it has none of its own."""
        n_saved = len({os.path.basename(path).partition("_mp_rank_")[0] for path in self.of_rank("*")})
        return self.of_rank(self._rank % n_saved) if n_saved else []

    def of_rank(self, rank: int | str) -> list[str]:
        """Those of one rank, or of all of them (``*``), as DeepSpeed lists them."""
        return sorted(glob.glob(os.path.join(glob.escape(self._folder), self._name_of(rank))))

    def frozen(self, numels: Mapping[str, int], n_saved: int) -> dict[str, torch.Tensor]:
        """This rank's shards of frozen weights, put together from those of the ranks that saved them.

        Args:
            numels: elements of each weight, by its name.
            n_saved: those ranks.

        Raises:
            CheckpointError: a weight is not among them.
        """
        saved: dict[int, Any] = {}
        shards = {}
        for name, numel in numels.items():
            parts = pieces([numel], n_saved, self._n_loading, self._rank)
            fragments = []
            for rank in [part.saved_by for part in parts] or [0]:
                if rank not in saved:
                    found = self.of_rank(rank)
                    path = found[0] if found else os.path.join(self._folder, self._name_of(rank))
                    saved[rank] = mapped(path)[FROZEN_PARAM_FRAGMENTS]
                fragment = saved[rank].get(name)
                if fragment is None or fragment.numel() != partition_numel(numel, n_saved):
                    raise CheckpointError(f"the checkpoint has no frozen weight {name} of {numel} elements")
                fragments.append(fragment)
            shards[name] = zeros(partition_numel(numel, self._n_loading), fragments[0].dtype)
            for part, fragment in zip(parts, fragments, strict=False):
                values = fragment[part.source : part.source + part.numel]
                shards[name][part.target : part.target + part.numel].copy_(values)
        return shards

    def _name_of(self, rank: int | str) -> str:
        return self._name.replace(f"zero_pp_rank_{self._rank}_", f"zero_pp_rank_{rank}_")


def mapped(path: str) -> Any:
    """What a file of a checkpoint holds, its tensors mapped into memory where its format allows it.

    Raises:
        CheckpointError: there is no such file.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: on another number of ranks than the checkpoint was saved by, each rank reads files of "
            "others. Copy them to every node, or resume on as many ranks"
        ) from error
    except RuntimeError:  # torch's format before zip archives
        return torch.load(path, map_location="cpu", weights_only=False)


def _load_resharded(engine: Any, load_dir: str, tag: str, n_saved: int, stock_load: Any) -> Any:
    """DeepSpeed's load of the optimizer's state, with this rank's part of what ``n_saved`` ranks have saved."""
    if engine.has_moe_layers:
        raise CheckpointError(
            f"the checkpoint was saved by {n_saved} ranks and holds experts, of which each rank has its own: resume on "
            "as many ranks, or convert it to a universal checkpoint"
        )
    group = engine.optimizer.dp_process_group
    rank, n_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    names = [
        engine._get_all_zero_checkpoint_names(load_dir, tag, bf16_mode)
        for bf16_mode in (engine.bfloat16_enabled(), not engine.bfloat16_enabled())
    ]
    paths = next((each for each in names if os.path.isfile(each[0])), names[0])
    mine = _resharded(engine.optimizer, paths, rank, n_ranks)
    engine.loaded_checkpoint_dp_world_size = n_ranks
    engine._get_all_zero_checkpoints = lambda *_: [mine if index == rank else None for index in range(n_ranks)]
    try:
        return stock_load(engine, load_dir, tag, True)
    finally:
        del engine._get_all_zero_checkpoints
        engine.loaded_checkpoint_dp_world_size = n_saved


def _resharded(optimizer: Any, paths: Sequence[str], rank: int, n_ranks: int) -> dict[str, Any]:
    """What this rank would have saved of a ZeRO-3 optimizer, from the files of the ranks that did."""
    numels = [param.ds_numel for param in itertools.chain.from_iterable(optimizer.fp16_groups)]
    parts = pieces(numels, len(paths), n_ranks, rank)
    used = sorted({piece.saved_by for piece in parts}) or [0]
    saved_numels = [partition_numel(numel, len(paths)) for numel in numels]
    saved = {index: _Saved(paths[index], sum(saved_numels)) for index in used}
    first = saved[used[0]]
    lengths = [sum(param.partition_numel() for param in group) for group in optimizer.fp16_groups]
    whole = {kind: zeros(sum(lengths), dtype) for kind, dtype in first.kinds.items()}
    for piece in parts:
        for kind, target in whole.items():
            saved[piece.saved_by].fill(kind, piece, target)
    groups = [optimizer.sub_group_to_group_id[index] for index in range(len(lengths))]
    saved_starts = list(itertools.accumulate(saved_numels, initial=0))  # of each weight; the same on every rank
    state: dict[int, dict[str, Any]] = {}
    masters, start, weight = [], 0, 0
    for number, length in enumerate(lengths):
        kinds, scalars = first.kinds_at(saved_starts[weight]), first.scalars(saved_starts[weight])
        values = {kind: whole[kind][start : start + length] for kind in kinds}
        masters.append(values.pop(FP32_FLAT_GROUPS))
        if values or scalars:
            state[number] = scalars | values
        start, weight = start + length, weight + len(optimizer.fp16_groups[number])
    packed = first.content[OPTIMIZER_STATE_DICT]
    if len(packed["param_groups"]) != len(optimizer.optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(packed['param_groups'])} groups of parameters, the optimizer "
            f"{len(optimizer.optimizer.param_groups)}"
        )
    param_groups = [
        {**saved_group, "params": [number for number, group in enumerate(groups) if group == index]}
        for index, saved_group in enumerate(packed["param_groups"])
    ]
    return {
        **first.content,
        OPTIMIZER_STATE_DICT: {**packed, "state": state, "param_groups": param_groups},
        FP32_FLAT_GROUPS: masters,
    }


class _Saved:
    """One rank's file of a ZeRO-3 optimizer: kinds of state, each as one run of elements over all sub-groups.

    Args:
        path: of the file.
        numel: elements of the rank's partitions of all weights that the model trains.

    Raises:
        CheckpointError: it is that of another model, or of an optimizer whose state is not one value per element.
    """

    def __init__(self, path: str, numel: int) -> None:
        self.content = mapped(path)[OPTIMIZER_STATE_DICT]
        masters = self.content[FP32_FLAT_GROUPS]
        lengths = [master.numel() for master in masters]
        if sum(lengths) != numel:
            raise CheckpointError(
                f"{path} holds {sum(lengths)} elements of trained weights, this model would have {numel} there: it was "
                "saved with another set of trainable parameters"
            )
        self._ends = list(itertools.accumulate(lengths))
        self._states: list[dict[str, torch.Tensor]] = [{FP32_FLAT_GROUPS: master.detach()} for master in masters]
        self._scalars: list[dict[str, Any]] = []
        packed = self.content[OPTIMIZER_STATE_DICT]
        for number, length in enumerate(lengths):
            self._scalars.append({})
            for kind, value in packed["state"].get(number, {}).items():
                if torch.is_tensor(value) and value.shape == (length,) and kind != "step":
                    self._states[number][kind] = value.detach()
                elif isinstance(value, Mapping) or (torch.is_tensor(value) and value.numel() > 1):
                    raise CheckpointError(
                        f"{path} was saved by another number of ranks, and its optimizer's {kind!r} has not one value "
                        "per element: resume on as many ranks"
                    )
                else:
                    self._scalars[-1][kind] = value
        for group in packed["param_groups"]:
            of_group = [self._states[number] for number in group["params"]]
            for kind in set().union(*of_group):
                n_with = sum(kind in state for state in of_group)
                if n_with != len(of_group):
                    raise CheckpointError(f"{path} has {kind!r} of {n_with} of {len(of_group)} sub-groups only")

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """Dtype of each kind, the master weights among them."""
        return {kind: value.dtype for state in self._states for kind, value in state.items()}

    def kinds_at(self, element: int) -> tuple[str, ...]:
        """Those of the sub-group with an element: Muon's matrices have others than what Adam trains beside them."""
        return tuple(self._states[self._sub_group(element)])

    def scalars(self, element: int) -> dict[str, Any]:
        """Of the sub-group with an element, the state that is not one value per element: a copy, because optimizers
        count in tensors."""
        return copy.deepcopy(self._scalars[self._sub_group(element)])

    def _sub_group(self, element: int) -> int:
        return min(bisect.bisect_right(self._ends, element), len(self._ends) - 1)

    def fill(self, kind: str, piece: Piece, target: torch.Tensor) -> None:
        """Copies the elements of a piece, which belong to one weight and so to one sub-group, to their place in
        ``target``, if that has this kind."""
        index = bisect.bisect_right(self._ends, piece.source)
        run = self._states[index].get(kind)
        if run is None:
            return
        start = piece.source - self._ends[index] + run.numel()
        target[piece.target : piece.target + piece.numel].copy_(run[start : start + piece.numel])
