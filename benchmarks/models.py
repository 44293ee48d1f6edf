# SPDX-License-Identifier: Apache-2.0
"""Llama-shaped causal language models of transformers with random weights; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch._dynamo  # noqa: F401  imported before zero.Init replaces torch's constructors, which it inspects
import transformers


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-shaped model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 32000


SHAPES: dict[str, Shape] = {
    "13M": Shape(256, 688, 4, 4, 8192),
    "125M": Shape(768, 2048, 12, 12),
    "364M": Shape(1024, 2816, 22, 16),
    "1.3B": Shape(2048, 5440, 24, 16),
    "2.7B": Shape(2560, 6912, 32, 20),
    "6.7B": Shape(4096, 11008, 32, 32),
    "13B": Shape(5120, 13824, 40, 40),
}


def build(name: str, sequence: int, *, checkpointing: bool = False) -> Any:
    """The model; call it within ``deepspeed.zero.Init``.

    Args:
        name: key of :data:`SHAPES`.
        sequence: longest sequence in tokens.
        checkpointing: whether activations are recomputed in backward.
    """
    shape = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=sequence,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
