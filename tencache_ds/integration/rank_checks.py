# SPDX-License-Identifier: Apache-2.0
"""Values that must be the same on every rank, compared before the first collective that depends on them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import deepspeed

import tencache_ds
from tencache_ds.engine import TenCacheEngine
from tencache_ds.errors import AgreementError
from tencache_ds.integration.agreement import Agreement, Post, difference

SHAPING_FIELDS = (
    "reduce_scatter",
    "reduce_bucket_size",
    "overlap_comm",
    "sub_group_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
"""Fields of ``zero_optimization`` that determine the contents and order of collectives. Fields that may differ are not
listed: folders, pinning, buffers, and TenCache's own options (the smallest ``host_memory`` applies to all)."""


def shaping_options(ds_config: Any) -> dict[str, Any]:
    """The values of a parsed DeepSpeed config, and of this environment, that must be equal on every rank, by the user's
    keys."""
    zero = ds_config.zero_config
    options: dict[str, Any] = {
        "the version of tencache_ds": tencache_ds.__version__,
        "the version of deepspeed": deepspeed.__version__,
        "bf16.enabled": bool(ds_config.bfloat16_config.enabled),
        "fp16.enabled": bool(ds_config.float16_config.enabled),
        "gradient_accumulation_steps": ds_config.gradient_accumulation_steps,
    }
    for section in ("offload_param", "offload_optimizer"):
        config = getattr(zero, section)
        device = "none" if config is None else config.device
        options[f"zero_optimization.{section}.device"] = str(getattr(device, "value", device))
    for name in SHAPING_FIELDS:
        key = type(zero).model_fields[name].alias or name
        options[f"zero_optimization.{key}"] = getattr(zero, name)
    return options


def compare_options(ranks: Sequence[Post]) -> None:
    """Compares :func:`shaping_options` of all ranks.

    Raises:
        AgreementError: names the first key that differs, the ranks and their values.
    """
    for key in dict.fromkeys(itertools.chain.from_iterable(rank.value for rank in ranks)):
        values = [rank.value.get(key) for rank in ranks]
        if any(value != values[0] for value in values):
            quoted = key if key.startswith("the ") else f'"{key}"'
            raise AgreementError(
                f"{difference(quoted, values, ranks)}. It determines the collectives of the ranks, so training "
                "would hang or compute wrong results. Give every host the same config and the same installation."
            )


def compare_homes(ranks: Sequence[Post]) -> None:
    """Compares the places of all weights, lists of ``[name, id, elements, on NVMe]`` in the order of registration.

    Raises:
        AgreementError: names the first weight that differs, the ranks and their values.
    """
    for entries in itertools.zip_longest(*(rank.value for rank in ranks)):
        if all(entry == entries[0] for entry in entries):
            continue
        name = next(entry[0] for entry in entries if entry is not None)
        raise AgreementError(
            f"{difference(f'weight {name!r}', [_described(entry) for entry in entries], ranks)}. The weights on "
            "NVMe determine the contents of a collective, so training would hang or compute wrong results. Build the "
            "same model, with the same config, on every rank."
        )


def agree_on_options(ds_config: Any) -> None:
    """Checks that every rank selects TenCache, and that its config shapes the same collectives. Every rank of the job
    calls it.

    Raises:
        AgreementError: names the key that differs, or the ranks that run without TenCache.
    """
    Agreement.of_job().reach("the DeepSpeed config", shaping_options(ds_config), compare_options)


def agree_on_homes(engines: Sequence[TenCacheEngine], module: Any) -> None:
    """The weights are in the same places on every rank. Every rank of the job calls it, once all are registered.

    Args:
        engines: those that hold the model's weights.
        module: the model.

    Raises:
        AgreementError: names the first weight that differs.
    """
    names = {param.ds_id: name for name, param in module.named_parameters() if hasattr(param, "ds_id")}
    homes = [
        [names.get(home.key, home.name), home.key, home.numel, home.on_nvme]
        for engine in engines
        for home in engine.weights.homes.all()
    ]
    agreement = Agreement.of_job()
    digest = hashlib.sha256(json.dumps(homes).encode()).hexdigest()
    if not agreement.reach("the placement of the weights", digest, _all_equal):
        agreement.reach("the weight that differs", homes, compare_homes)


def _all_equal(ranks: Sequence[Post]) -> bool:
    return all(rank.value == ranks[0].value for rank in ranks)


def _described(entry: Sequence[Any] | None) -> str:
    if entry is None:
        return "no such weight"
    name, key, numel, on_nvme = entry
    return f"{name!r} (id {key}), {numel} elements, {'on NVMe' if on_nvme else 'in host memory'}"
