# SPDX-License-Identifier: Apache-2.0
"""Where a model's weights, gradients and optimizer state live, weight by weight. Any thread may look; what is being
moved at that moment counts where it was, or where it goes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tencache_ds.integration.device_weights import place_of
from tencache_ds.integration.module_weights import shard_nbytes
from tencache_ds.placement.places import Place


def residency(module: Any, optimizer: Any) -> dict[str, dict[str, list[int]]]:
    """Bytes of this rank's shards.

    Args:
        module: the model.
        optimizer: its :class:`~tencache_ds.integration.stage3.TenCacheZeroOptimizer_Stage3`, or DeepSpeed's offload
            object where there is no optimizer.

    Returns:
        For each weight's name, in the order of the model, ``weights``, ``gradients`` and ``optimizer state`` as bytes
        by :class:`~tencache_ds.placement.places.Place`. State that DeepSpeed keeps itself is not included.

    Raises:
        RuntimeError: weights or chunks came or went meanwhile.
    """
    state = _state(optimizer)
    gradients = getattr(optimizer, "_gradients", None)
    result = {}
    for name, param in module.named_parameters():
        if not hasattr(param, "ds_tensor"):
            continue
        weight, gradient = [0] * len(Place), [0] * len(Place)
        weight[place_of(param)] = shard_nbytes(param)
        if gradients is not None and gradients.accumulates(param.ds_id):
            place = Place.GPU if gradients.on_device(param.ds_id) else Place.HOST
            gradient[place] = gradients.nbytes_of(param.ds_id)
        result[name] = {"weights": weight, "gradients": gradient, "optimizer state": [*map(round, state[param.ds_id])]}
    return result


def _state(optimizer: Any) -> defaultdict[int, list[float]]:
    """Bytes of optimizer state by place for each weight; a chunk's are divided by its elements."""
    by_key: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * len(Place))
    tier, weights = getattr(optimizer, "_state", None), getattr(optimizer, "_model_weights", None)
    if tier is not None and weights is not None:
        for index in range(len(optimizer.fp16_groups)):
            for chunk, place in zip(tier.chunks(index), tier.places(index), strict=True):
                per_element = tier.nbytes_of(chunk) / chunk.numel
                for key, numel in weights.elements_of(chunk):
                    by_key[key][place] += numel * per_element
    return by_key
