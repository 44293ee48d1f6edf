# SPDX-License-Identifier: Apache-2.0
"""Decisions of all ranks together, and a clear error on every rank if they cannot agree.

[Note: through the store] Ranks meet in the key-value store of the process group, not in a collective. A rank that runs
without TenCache, or does something else, is in another collective at that time: ours would be matched with it, which
aborts the process or hangs it until the watchdog fires. Through the store the missing ranks can be named. The first
rank decides, from the posts of all ranks, and posts the result, so that the decision cannot differ.

Values that must be the same on every rank are compared before the first collective that depends on them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch.distributed
from deepspeed import comm as dist

import tencache_ds
from tencache_ds.config import Checkpoint, TenCacheConfig
from tencache_ds.errors import AgreementError, named_ranks
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.names import OPTIONS_KEY
from tencache_ds.runtime.engine import TenCacheEngine
from tencache_ds.tiers.weight_homes import WeightHome

logger = logging.getLogger("DeepSpeed.tencache")

PATIENCE_S = 20.0
"""After that it is said for whom is being waited."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1
"""Interval between two polls of the store."""

GRACE_S = 15.0
"""By so much others wait longer for the first rank's result than the first rank waits for them."""

SHORTEST_VOTE_PAUSE_S, LONGEST_VOTE_PAUSE_S = 0.0002, 0.005
"""The same where ranks vote in each step; they come together."""

_SHOWN_RANKS = 8
_FAILED = 1 << 32
"""A vote of a rank that has failed."""


@dataclass(frozen=True, slots=True)
class Post:
    """The post of one rank.

    Attributes:
        host: the name of its host.
        topic: the decision that it expects.
        value: its contribution, as JSON has it.
    """

    host: str
    topic: str
    value: Any


class Agreement:
    """The ranks of a job, deciding one thing after another. Training thread only; every rank has to take part.

    Args:
        store: the process group's store, or None for one rank alone.
        rank: global rank.
        world_size: number of ranks.
        timeout_s: longest wait for all ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s

    @classmethod
    def of_job(cls) -> Agreement:
        """All ranks of the initialized process group, for as long as its collectives may take."""
        return cls(*_job())

    def reach(self, topic: str, value: Any, decide: Callable[[Sequence[Post]], Any]) -> Any:
        """The result of ``decide`` for the posts of all ranks, in rank order: the same on each of them.

        Args:
            topic: name of the decision, for messages.
            value: this rank's contribution, which JSON can express.
            decide: called once, on the first rank; its result is something JSON can express, too.

        Raises:
            AgreementError: raised by ``decide``, on every rank; or a rank did not come, or came for something else.
        """
        mine = Post(socket.gethostname(), topic, value)
        if self._world_size == 1:
            return decide([mine])
        with _noticing_a_lost_store(self._rank, f"while the ranks were agreeing on {topic}"):
            return self._reach(mine, decide)

    def _reach(self, mine: Post, decide: Callable[[Sequence[Post]], Any]) -> Any:
        # The store counts, so that no state outlives its decision: the n-th meeting of each rank is the same one.
        number = self._store.add(f"tencache/meetings/{self._rank}", 1)
        keys = [f"tencache/meeting/{number}/{rank}" for rank in range(self._world_size)]
        result = f"tencache/meeting/{number}/result"
        self._store.set(keys[self._rank], json.dumps([mine.host, mine.topic, mine.value]))
        if self._rank == 0:
            try:
                outcome = {"result": self._decided(keys, mine, decide)}
            except Exception as error:
                self._store.set(result, json.dumps({"error": str(error)}))
                raise
            self._store.set(result, json.dumps(outcome))
            for key in keys:
                self._store.delete_key(key)
        else:
            self._wait(keys, mine.topic, self._timeout_s + GRACE_S, until=result)
        outcome = json.loads(self._store.get(result))
        if "error" in outcome:
            raise AgreementError(outcome["error"])
        return outcome["result"]

    def _decided(self, keys: list[str], mine: Post, decide: Callable[[Sequence[Post]], Any]) -> Any:
        self._wait(keys, mine.topic, self._timeout_s)
        posts = [Post(*json.loads(self._store.get(key))) for key in keys]
        if any(post.topic != mine.topic for post in posts):
            raise AgreementError(
                f"{difference('the topic to agree on', [post.topic for post in posts], posts)}. They do not run the "
                "same program, or not with the same config."
            )
        return decide(posts)

    def _wait(self, keys: list[str], topic: str, limit_s: float, until: str | None = None) -> None:
        """Waits for the posts of all ranks, or ``until`` another key is there.

        By asking again and again: each kind of store has its own answer to a wait that takes too long.
        """
        wanted = keys if until is None else [until]
        t_start, pause_s, said = time.monotonic(), SHORTEST_PAUSE_S, False
        while not self._store.check(wanted):
            waited_s = time.monotonic() - t_start
            if waited_s > limit_s:
                # All are there where the first rank ended before it had a result.
                missing = self._missing(keys) or [0]
                raise AgreementError(
                    f"{_names(missing)} did not respond within {limit_s:.0f} s to agree on {topic}. {_WHY_MISSING}"
                )
            if waited_s > PATIENCE_S and not said:
                said, missing = True, self._missing(keys)
                if missing and (self._rank == 0 or 0 in missing):  # where the first rank waits too, it speaks for all
                    logger.warning(
                        "rank %d is waiting for %s to agree on %s. %s", self._rank, _names(missing), topic, _WHY_MISSING
                    )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


class JobVotes:
    """Points at which the ranks of a job tell each other whether they have failed: see
    :class:`~tencache_ds.runtime.step_guard.Votes`. One thread at a time. The store counts those who have come and
    those who have failed in one number, so that a rank asks once if it is the last one.

    Args:
        name: the same on every rank, and no other votes of the job have it.
        store: the process group's store, or None for one rank alone.
        rank: global rank.
        world_size: number of ranks.
        timeout_s: longest wait for all ranks.
    """

    def __init__(self, name: str, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._name = name
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._numbers: dict[str, int] = {}

    @classmethod
    def of_job(cls, name: str) -> JobVotes:
        """All ranks of the initialized process group, for as long as its collectives may take."""
        return cls(name, *_job())

    def passed(self, point: str) -> list[int]:
        """See :meth:`~tencache_ds.runtime.step_guard.Votes.passed`.

        Raises:
            AgreementError: a rank did not come, or the store is gone.
        """
        if self._store is None:
            return []
        number = self._next(point)
        key = self._key(point, number)
        with _noticing_a_lost_store(self._rank, f"at {point}"):
            votes = self._store.add(key, 1)
            if votes == self._world_size and number > 1:  # so all have left the point before
                self._store.delete_key(self._key(point, number - 1))
            votes = self._wait(key, point, votes)
            if votes < _FAILED:
                return []
            return [rank for rank in range(self._world_size) if self._store.check([f"{key}/{rank}"])]

    def leaves(self, point: str) -> None:
        """This rank has come to its meeting of that name, as :meth:`passed` waits for, and does not wait."""
        if self._store is not None:
            with _noticing_a_lost_store(self._rank, f"at {point}"):
                self._store.add(self._key(point, self._next(point)), 1)

    def failed(self, point: str) -> None:
        """See :meth:`~tencache_ds.runtime.step_guard.Votes.failed`."""
        if self._store is None:
            return
        key = self._key(point, self._next(point))
        with contextlib.suppress(torch.distributed.DistNetworkError):  # what has failed is about to be raised
            self._store.set(f"{key}/{self._rank}", "")
            self._store.add(key, _FAILED)

    def _next(self, point: str) -> int:
        number = self._numbers[point] = self._numbers.get(point, 0) + 1
        return number

    def _key(self, point: str, number: int) -> str:
        return f"tencache/votes/{self._name}/{point}/{number}"

    def _wait(self, key: str, point: str, votes: int) -> int:
        t_start, pause_s, said = time.monotonic(), SHORTEST_VOTE_PAUSE_S, False
        while votes < self._world_size:
            waited_s = time.monotonic() - t_start
            if waited_s > self._timeout_s:
                raise AgreementError(
                    f"{self._absent(key, votes)} did not come to {point} within {self._timeout_s:.0f} s: see the logs "
                    "there for the failure, of a process or of a node, and start the job again from a checkpoint"
                )
            if waited_s > PATIENCE_S and not said:
                said = True
                self._store.set(f"{key}/{self._rank} waits", "")
                logger.warning(
                    "rank %d is waiting at %s for %s: they are slower, or have failed (see their logs)",
                    self._rank, point, self._absent(key, votes),
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_VOTE_PAUSE_S)
            votes = self._store.add(key, 0)
        return votes

    def _absent(self, key: str, votes: int) -> str:
        """Who has not come, by rank where all others have said that they wait."""
        ranks = [rank for rank in range(self._world_size) if not self._store.check([f"{key}/{rank} waits"])]
        if len(ranks) == self._world_size - votes:
            return _names(ranks)
        return f"{self._world_size - votes} of {self._world_size} ranks"


def _job() -> tuple[Any, int, int, float]:
    """Store, rank, number of ranks and timeout of the initialized process group; no store for one rank alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return None, rank, 1, 0.0
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return store, rank, world_size, store.timeout.total_seconds()


@contextlib.contextmanager
def _noticing_a_lost_store(rank: int, when: str) -> Iterator[None]:
    try:
        yield
    except torch.distributed.DistNetworkError as error:
        raise AgreementError(
            f"rank {rank} lost the store of the process group {when}: the process that hosts it, usually rank 0, has "
            f"ended; see its log ({error})"
        ) from error


_WHY_MISSING = (
    "Either they are slower, or have failed (see their logs), or run without TenCache: every rank's config needs "
    '"offload_engine": "tencache" (or every rank\'s environment TENCACHE_ENABLE), and every host the same tencache_ds '
    "installed."
)


def agreed(topic: str, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
    """The result of ``decide`` for the values of all ranks of the job: see :meth:`Agreement.reach`."""
    return Agreement.of_job().reach(topic, value, lambda posts: decide([post.value for post in posts]))


def difference(what: str, values: Sequence[Any], posts: Sequence[Post]) -> str:
    """A sentence that says which ranks have which value of ``what``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(rank)
    parts = [f"{value} on {_names(numbers)} ({posts[numbers[0]].host})" for value, numbers in ranks.items()]
    return f"the ranks differ in {what}: {'; '.join(parts)}"


def _names(ranks: Sequence[int]) -> str:
    return named_ranks(ranks, _SHOWN_RANKS)


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
