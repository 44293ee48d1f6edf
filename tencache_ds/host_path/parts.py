# SPDX-License-Identifier: Apache-2.0
"""Which parts of DeepSpeed's host path are TenCache's in one DeepSpeed engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tencache_ds.config import TenCacheConfig
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.seams import Feature, works


@dataclass(frozen=True, slots=True)
class HostPath:
    """The parts that are TenCache's, from the construction of an engine to its end. All others are DeepSpeed's own
    functions; by default all are.

    Attributes:
        fetches: fetches and releases of modules.
        gathers: gathers that the host does not wait for.
        rank_gathers: of these, the collectives of several ranks: not where the config prescribes another way.
        buckets: gradients enter DeepSpeed's buckets several at a time.
        norms: norms of gradients are completed for all of them at once.
        hooks: lighter hooks on modules, or none where they have nothing to do.
        linear: linear layers without gradients are computed without autograd.
        streams: the current stream is asked for directly.
        graphs: what recurs in a step is launched by CUDA graphs.
    """

    fetches: bool = False
    gathers: bool = False
    rank_gathers: bool = False
    buckets: bool = False
    norms: bool = False
    hooks: bool = False
    linear: bool = False
    streams: bool = False
    graphs: bool = False

    @classmethod
    def of(cls, options: TenCacheConfig, zero_config: Any) -> HostPath:
        """The parts for an engine: none if they are switched off, else those whose seams the installed DeepSpeed has.

        Args:
            options: its own.
            zero_config: the parsed ``zero_optimization`` section of its config.
        """
        if not options.host_path:
            return cls()
        gathers = works(Feature.GATHERS)
        return cls(
            fetches=works(Feature.FETCHES),
            gathers=gathers,
            rank_gathers=gathers and not _prescribes_gathers(zero_config),
            buckets=works(Feature.BUCKETS),
            norms=works(Feature.NORMS),
            hooks=works(Feature.HOOKS),
            linear=works(Feature.LINEAR),
            streams=True,
            graphs=True,
        )


def _prescribes_gathers(zero_config: Any) -> bool:
    """Whether a config prescribes a way of gathering weights that only DeepSpeed has."""
    return bool(zero_config.use_all_reduce_for_fetch_params) or calls.gathers_one_by_one(zero_config)
