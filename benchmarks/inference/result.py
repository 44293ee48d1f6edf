# SPDX-License-Identifier: Apache-2.0
"""The figures of one system's generation."""

from __future__ import annotations

import statistics

from pydantic import BaseModel, ConfigDict

from tencache_ds.profiling.hardware import Hardware


class Generation(BaseModel):
    """Times of one system; lists have one entry per round.

    Attributes:
        built_s: until the model could generate.
        prompt_s: seconds for reading the prompt and generating one token.
        token_s: seconds for each further token, of all sequences together.
        tokens: of each sequence, those generated in the last round.
        varies: whether other rounds have generated others.
        model_nbytes: of the weights, in 16 bits.
        gpu_peak_nbytes: the most that tensors took of GPU memory; None on a CPU.
        rss_peak_nbytes: the most that the process took of RAM.
        gpu_nbytes, host_nbytes, nvme_nbytes: TenCache's weights by place, at the end.
    """

    model_config = ConfigDict(extra="forbid")

    built_s: float
    prompt_s: list[float]
    token_s: list[float]
    tokens: list[list[int]]
    varies: bool = False
    model_nbytes: int
    gpu_peak_nbytes: int | None
    rss_peak_nbytes: int
    gpu_nbytes: int | None = None
    host_nbytes: int | None = None
    nvme_nbytes: int | None = None

    @property
    def seconds_per_token(self) -> float:
        """Median."""
        return statistics.median(self.token_s)

    def compare(self, other: Generation) -> str:
        """Whether the tokens are those of another system: in a few words, for a table."""
        if self.varies:
            return "vary"
        firsts = [
            next((place for place, (ours, theirs) in enumerate(zip(*pair, strict=True)) if ours != theirs), None)
            for pair in zip(self.tokens, other.tokens, strict=True)
        ]
        places = [place for place in firsts if place is not None]
        if not places:
            return "equal"
        return f"{len(places)} of {len(firsts)} differ, from {min(places) + 1} on"

    def bound_s(self, hardware: Hardware, on_nvme: bool) -> float | None:
        """The time that a token's transfers take at the measured rates; None where these or the places are not known.

        Args:
            hardware: of this machine.
            on_nvme: of a system that does not say where its weights are: whether all of them are on NVMe, or in RAM.
        """
        nvme = self.model_nbytes if self.nvme_nbytes is None and on_nvme else self.nvme_nbytes or 0
        host = self.model_nbytes - nvme if self.host_nbytes is None else self.host_nbytes
        seconds = []
        if nvme and hardware.storage is not None:
            seconds.append(nvme / hardware.storage.read_bytes_per_s)
        if nvme + host and hardware.h2d_bytes_per_s is not None:
            seconds.append((nvme + host) / hardware.h2d_bytes_per_s)
        return max(seconds, default=None)
