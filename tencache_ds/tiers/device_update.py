# SPDX-License-Identifier: Apache-2.0
"""The update of those chunks of optimizer state that live in device memory, on the compute device's own stream: an
:class:`~tencache_ds.tiers.update.InPlaceKernel`.

Their gradients are accumulated there and their weights live there, so nothing is copied to the host. A weight of which
some elements belong to chunks elsewhere has its gradient in host memory: those elements are copied to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.device_adam import DeviceAdam, Launch, Run
from tencache_ds.tiers.fused_adam import TYPES
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.kinds import EXP_AVG, EXP_AVG_SQ, MASTER
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.update import Pieces, SubGroupStep
from tencache_ds.tiers.weight_writer import WeightWriter

Places = tuple[int, int, tuple[int, ...]]


@dataclass(slots=True)
class _Prepared:
    """A sub-group's launch, for as long as nothing changes its place.

    Attributes:
        places: versions of the places of state and gradients, and the addresses of weights: the launch has those of
            all three.
        launch: updates the chunks; None where there are none.
        chunks: the chunks it updates.
        copies: ``(device, host)`` of gradients that have to be copied before.
    """

    places: Places
    launch: Launch | None
    chunks: list[Chunk]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class DeviceUpdate:
    """Used by the training thread.

    Args:
        adam: the kernel.
        width: elements per vector of DeepSpeed's CPU Adam: a sub-group's remainder is its scalar tail.
        tier: master weights and moments.
        gradients: the accumulated gradients.
        writer: the weights. Those of chunks in device memory have to be there too.
    """

    def __init__(
        self,
        adam: DeviceAdam,
        width: int,
        tier: OptimizerStateTier,
        gradients: GradientTier,
        writer: WeightWriter,
    ) -> None:
        self._adam = adam
        self._width = width
        self._tier = tier
        self._gradients = gradients
        self._writer = writer
        self._prepared: dict[int, _Prepared] = {}

    def start(self, step: SubGroupStep) -> frozenset[int]:
        """Starts the update of a sub-group's chunks in device memory; later work on the current stream sees them
        updated.

        Returns:
            The indices of the chunks that are updated; those whose gradient was replaced at a higher precision are not.
        """
        while True:
            prepared = self._prepared_for(step)  # allocates, for which chunks may have to leave
            with self._tier.holding_device():
                if prepared.places != self._places(step.sub_group):
                    continue
                for device, host in prepared.copies:
                    device.copy_(host, non_blocking=True)
                if prepared.launch is not None:
                    prepared.launch(step.scalars)
                    self._writer.order_gathers()
                return frozenset(chunk.index for chunk in prepared.chunks)

    def _places(self, sub_group: int) -> Places:
        return (self._tier.version, self._gradients.version, self._writer.addresses(sub_group))

    def _prepared_for(self, step: SubGroupStep) -> _Prepared:
        self._tier.collect()
        places = self._places(step.sub_group)
        if self._gradients.any_replaced:
            return self._prepare(step.sub_group, step.start, places)  # for this step only
        prepared = self._prepared.get(step.sub_group)
        if prepared is None or prepared.places != places:
            prepared = self._prepared[step.sub_group] = self._prepare(step.sub_group, step.start, places)
        return prepared

    def _prepare(self, sub_group: int, start: int, places: Places) -> _Prepared:
        prepared = _Prepared(places, None, [])
        runs: list[Run] = []
        weight_dtype = None
        numel = self._tier.numel(sub_group)
        for chunk in self._tier.chunks(sub_group):
            if not self._tier.on_device(chunk) or self._writer.stored(chunk):
                continue
            gradients = self._gradients.pieces(start + chunk.start, chunk.numel)
            weights = self._writer.open(chunk)
            self._writer.close(chunk)
            views = self._tier.device_views(chunk)
            dtypes = {weight.dtype for _, weight in weights}
            on_device = all(weight.device == views[MASTER].device for _, weight in weights)
            if gradients is None or not on_device or len(dtypes) != 1 or not dtypes <= TYPES.keys():
                continue
            weight_dtype = weights[0][1].dtype
            gradients = [(first, self._here(each, views[MASTER].device, prepared)) for first, each in gradients]
            end = chunk.start + chunk.numel
            n_tail = numel % self._width if end == numel else 0
            runs += _runs(views, gradients, weights, chunk.numel, n_tail)
            prepared.chunks.append(chunk)
        if weight_dtype is not None:
            prepared.launch = self._adam.prepare(runs, self._gradients.dtype, weight_dtype)
        return prepared

    @staticmethod
    def _here(gradient: torch.Tensor, device: torch.device, prepared: _Prepared) -> torch.Tensor:
        if gradient.device == device:
            return gradient
        copy = torch.empty_like(gradient, device=device)
        prepared.copies.append((copy, gradient))
        return copy


def _runs(views: dict[str, torch.Tensor], gradients: Pieces, weights: Pieces, numel: int, n_tail: int) -> Iterator[Run]:
    """A chunk cut wherever its gradient or its weight ends and another tensor begins."""
    ends = {first + each.numel() for first, each in (*gradients, *weights)} | {first for first, _ in weights}
    cuts = sorted({0, numel} | ends)
    for first, end in zip(cuts, cuts[1:], strict=False):
        yield Run(
            _address(views[MASTER], first),
            _address(views[EXP_AVG], first),
            _address(views[EXP_AVG_SQ], first),
            gradient=_address_among(gradients, first),
            weight=_address_among(weights, first),
            numel=end - first,
            n_tail=max(0, end - max(first, numel - n_tail)),
        )


def _address(tensor: torch.Tensor, element: int) -> int:
    return tensor.data_ptr() + element * tensor.element_size()


def _address_among(pieces: Pieces, element: int) -> int:
    """Address of an element in the tensor that holds it; 0 where none does."""
    for first, tensor in pieces:
        if first <= element < first + tensor.numel():
            return _address(tensor, element - first)
    return 0
