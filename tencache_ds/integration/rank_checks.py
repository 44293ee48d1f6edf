# SPDX-License-Identifier: Apache-2.0
"""Values that must be the same on every rank, compared before the first collective that depends on them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed

import tencache_ds
from tencache_ds.config import Checkpoint, TenCacheConfig
from tencache_ds.errors import AgreementError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.agreement import Agreement, Post, difference
from tencache_ds.names import OPTIONS_KEY
from tencache_ds.runtime.engine import TenCacheEngine
from tencache_ds.tiers.weight_record import WeightHome

logger = logging.getLogger("DeepSpeed.tencache")

OWN_FIELDS = frozenset({
    "offload_param",  # of both the device is compared
    "offload_optimizer",
    "cpu_offload_use_pin_memory",
    "pipeline_loading_checkpoint",
    "log_trace_cache_warnings",
})  # fmt: skip
"""Fields of ``zero_optimization`` that may differ: folders, pinning, buffers and messages. All others are compared, as
nearly all of them determine the contents or the order of collectives; those of a DeepSpeed to come may, too."""

SWITCHES: dict[str, tuple[bool | Checkpoint, str]] = {
    "overlap_step": (False, "No rank's step continues behind the next forward pass."),
    "host_path": (False, "All ranks use DeepSpeed's own host path."),
    "checkpoint": (Checkpoint.synchronous, "All ranks save checkpoints before save_checkpoint() returns."),
}
"""Options that determine which weights are gathered together, or where ranks meet; their value where ranks differ in
them, and what that means."""


def shaping_options(ds_config: Any) -> dict[str, Any]:
    """The values of a parsed DeepSpeed config, and of this environment, that must be equal on every rank, by the user's
    keys."""
    zero = ds_config.zero_config
    bf16, fp16 = calls.half_precision(ds_config)
    autocast, autocast_dtype = calls.autocast(ds_config)
    options: dict[str, Any] = {
        "the version of tencache_ds": tencache_ds.__version__,
        "the version of deepspeed": deepspeed.__version__,
        "bf16.enabled": bf16,
        "fp16.enabled": fp16,
        "torch_autocast.enabled": autocast,
        "torch_autocast.dtype": autocast_dtype,
        "communication_data_type": str(ds_config.communication_data_type),
        "data_types.grad_accum_dtype": str(ds_config.grad_accum_dtype),
        "gradient_accumulation_steps": ds_config.gradient_accumulation_steps,
    }
    for section in ("offload_param", "offload_optimizer"):
        config = getattr(zero, section)
        device = "none" if config is None else config.device
        options[f"zero_optimization.{section}.device"] = str(getattr(device, "value", device))
    values = zero.model_dump(mode="json", exclude=set(OWN_FIELDS), warnings=False)
    for name, value in values.items():
        options[f"zero_optimization.{type(zero).model_fields[name].alias or name}"] = value
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


def agree_on_options(ds_config: Any) -> None:
    """Checks that every rank selects TenCache, and that its config shapes the same collectives. Every rank of the job
    calls it.

    Raises:
        AgreementError: names the key that differs, or the ranks that run without TenCache.
    """
    Agreement.of_job().reach("the DeepSpeed config", shaping_options(ds_config), compare_options)


def agree_on_switches(options: TenCacheConfig) -> TenCacheConfig:
    """The options, with those switches that all ranks agree on. Every rank of the job calls it.

    Raises:
        AgreementError: not all of them do.
    """
    mine = options.model_dump(mode="json", include=set(SWITCHES))
    agreed = Agreement.of_job().reach("what all ranks may do", mine, _the_same_everywhere)
    return options.model_copy(update={name: type(getattr(options, name))(value) for name, value in agreed.items()})


def _the_same_everywhere(ranks: Sequence[Post]) -> dict[str, bool | str]:
    agreed = {}
    for name, (fallback, consequence) in SWITCHES.items():
        values = [rank.value[name] for rank in ranks]
        agreed[name] = values[0]
        if len(set(values)) > 1:
            agreed[name] = fallback
            logger.warning("%s. %s", difference(f'"{OPTIONS_KEY}.{name}"', values, ranks), consequence)
    return agreed


def agree_on_weights(engines: Sequence[TenCacheEngine], module: Any) -> None:
    """The weights are the same on every rank, and in the same places. Every rank of the job calls it, once all are
    registered.

    Args:
        engines: those that hold the model's weights.
        module: the model.

    Raises:
        AgreementError: names the first weight that differs.
    """
    homes = {home.key: home for engine in engines for home in engine.weights.homes.all()}
    params = {name: param for name, param in module.named_parameters() if hasattr(param, "ds_id")}
    # Weights that are gathered together lie in the order of their ids, which need not be the same numbers.
    place_of = {key: place for place, key in enumerate(sorted(param.ds_id for param in params.values()))}
    weights = [
        [name, place_of[param.ds_id], _described(param, homes.get(param.ds_id))] for name, param in params.items()
    ]
    agreement = Agreement.of_job()
    digest = hashlib.sha256(json.dumps(weights).encode()).hexdigest()
    if not agreement.reach("the weights and their places", digest, _all_equal):
        agreement.reach("the weight that differs", weights, compare_weights)


def compare_weights(ranks: Sequence[Post]) -> None:
    """Compares all weights, lists of ``[name, number, description]`` in the order of the model.

    Raises:
        AgreementError: names the first weight that differs, the ranks and their values.
    """
    for entries in itertools.zip_longest(*(rank.value for rank in ranks)):
        if all(entry == entries[0] for entry in entries):
            continue
        name = next(entry[0] for entry in entries if entry is not None)
        values = [
            "no such weight" if each is None else f"{each[0]!r} (number {each[1]}), {each[2]}" for each in entries
        ]
        raise AgreementError(
            f"{difference(f'weight {name!r}', values, ranks)}. They determine the contents of collectives, so training "
            "would hang or compute wrong results. Build the same model, with the same config, on every rank."
        )


@contextlib.contextmanager
def failing_together(topic: str) -> Iterator[None]:
    """A block that ends on all ranks or on none: an error of one rank within it is raised there, and named by the
    others. Every rank of the job enters it; at its end none has got further.

    Args:
        topic: what the block is about.

    Raises:
        AgreementError: on the ranks that have no error of their own.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failures = Agreement.of_job().reach(topic, "" if error is None else f"{type(error).__name__}: {error}", _failures)
    if error is not None:
        raise error
    if failures:
        rank, reason = failures[0]
        raise AgreementError(f"rank {rank} cannot go on, and no rank can without it: {reason}")


def _failures(ranks: Sequence[Post]) -> list[tuple[int, str]]:
    return [(rank, post.value) for rank, post in enumerate(ranks) if post.value]


def _all_equal(ranks: Sequence[Post]) -> bool:
    return all(rank.value == ranks[0].value for rank in ranks)


def _described(param: Any, home: WeightHome | None) -> str:
    """What of a weight determines collectives."""
    place = "outside the tiers" if home is None else "on NVMe" if home.on_nvme else "in host memory"
    kept = ", kept gathered" if param.ds_persist else ""
    trained = "trained" if param.requires_grad else "frozen"
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{int(param.ds_numel)} elements of {dtype}, {trained}{kept}, {place}"
