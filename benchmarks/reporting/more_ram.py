# SPDX-License-Identifier: Apache-2.0
"""What TenCache's configurations with less RAM predict for those with more, beside what these took."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import NamedTuple

from tencache_ds.cli.plan import observed
from tencache_ds.planning.step_prediction import outlook

from .figures import Figures


class Prediction(NamedTuple):
    """A step with more RAM."""

    by: Figures  # whose last step it is made from, as ``tencache plan --job`` does
    of: Figures  # the same settings and more RAM
    more_nbytes: int  # RAM for weights and state, of rank 0
    seconds: float  # of its step


def predictions(figures: Iterable[Figures]) -> list[Prediction]:
    """Predictions of each configuration with something on NVMe for every one that has more in RAM and is else alike."""
    ours = [f for f in figures if f.is_ours and f.measured and f.stats.get("last_step") and "paths" in f.stats]
    found = []
    for _, alike in itertools.groupby(sorted(ours, key=_other_settings), key=_other_settings):
        for by, of in itertools.combinations(sorted(alike, key=_in_ram_nbytes), 2):
            more = _in_ram_nbytes(of) - _in_ram_nbytes(by)
            if more > 0 and by.stats["stored_nbytes"]:
                step = observed([by.stats["last_step"]], by.stats)
                found.append(Prediction(by, of, more, outlook(step, more).seconds))
    return found


def _other_settings(f: Figures) -> str:
    config = f.started[-1].deepspeed_config
    section = {key: value for key, value in config.get("tencache", {}).items() if key != "host_memory"}
    return json.dumps([f.configuration.peer, config | {"tencache": section}], sort_keys=True)


def _in_ram_nbytes(f: Figures) -> int:
    return int(f.stats["resident_weight_nbytes"]) + int(f.stats["resident_state_nbytes"])
