# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers with random weights: Llama-shaped ones, and the shapes of 10Cache's paper.

Nothing is downloaded. Sizes are those of the published configurations; the paper states batch 16 and fp16 and no
sequence lengths, so the ones here are of its data sets: 128 tokens for the sentence pairs of MRPC and CoLA, 512 for
wikitext-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Spec:
    """A model and how it is trained unless the command line says otherwise."""

    family: str  # which of transformers' architectures ("llama", "opt", "bloom", "falcon")
    sizes: dict[str, Any]  # arguments of its configuration class
    micro_batch: int = 4  # sequences per micro-step and rank
    sequence: int = 512  # tokens per sequence
    precision: str = "bf16"  # or "fp16"
    paper: bool = False  # whether it is one of the paper's models


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int = 32000) -> Spec:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate,
             "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
             "tie_word_embeddings": False}  # fmt: skip
    return Spec("llama", sizes)


def _opt(hidden: int, layers: int, heads: int) -> Spec:
    sizes = {"vocab_size": 50272, "hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers,
             "num_attention_heads": heads, "word_embed_proj_dim": hidden, "dropout": 0.0,
             "tie_word_embeddings": True}  # fmt: skip
    return Spec("opt", sizes, 16, 128, "fp16", paper=True)


SPECS: dict[str, Spec] = {
    "7M": _llama(256, 688, 4, 4, 8192),
    "125M": _llama(768, 2048, 12, 12),
    "364M": _llama(1024, 2816, 22, 16),
    "1.3B": _llama(2048, 5440, 24, 16),
    "2.7B": _llama(2560, 6912, 32, 20),
    "6.7B": _llama(4096, 11008, 32, 32),
    "13B": _llama(5120, 13824, 40, 40),
    "OPT-6.7B": _opt(4096, 32, 32),
    "OPT-13B": _opt(5120, 40, 40),
    "Bloom-7B": Spec(
        "bloom",
        {"vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32, "tie_word_embeddings": True},
        16, 128, "fp16", paper=True,
    ),
    "Falcon-7B": Spec(
        "falcon",
        {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
         "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False, "tie_word_embeddings": True},
        16, 512, "fp16", paper=True,
    ),
    "Falcon3-10B": Spec(
        "llama",
        {"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 23040, "num_hidden_layers": 40,
         "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 256,
         "tie_word_embeddings": False},
        16, 512, "fp16", paper=True,
    ),
    "Falcon-11B": Spec(
        "falcon",
        {"vocab_size": 65024, "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
         "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False, "alibi": False,
         "tie_word_embeddings": False},
        16, 512, "fp16", paper=True,
    ),
}  # fmt: skip


def build(name: str, sequence: int, *, checkpointing: bool = False) -> Any:
    """The model; call it within ``deepspeed.zero.Init`` (after :func:`prepare`) or, for a count, on the meta device.

    Args:
        name: key of :data:`SPECS`.
        sequence: longest sequence in tokens.
        checkpointing: whether activations are recomputed in backward.

    Raises:
        ValueError: unknown model.
    """
    import transformers

    if name not in SPECS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(SPECS)}")
    spec = SPECS[name]
    positions = "seq_length" if spec.family == "bloom" else "max_position_embeddings"
    # A padding token would be looked up in the embedding at construction, which zero.Init has partitioned by then.
    config = transformers.AutoConfig.for_model(spec.family, **spec.sizes, **{positions: sequence}, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Within it torch makes tensors of this dtype unless told otherwise."""
    import torch

    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def prepare() -> None:
    """Imports modules that ``zero.Init``'s replacements of torch's constructors would confuse. Call it before."""
    import importlib

    for name in ("torch._dynamo", "transformers"):
        importlib.import_module(name)


class Census(NamedTuple):
    """Elements of all of a model's parameters, and of the largest one."""

    numel: int
    largest: int


def census(name: str, sequence: int) -> Census:
    """Counts without memory: the model is built on the meta device. Takes seconds for large ones."""
    import torch

    prepare()
    with torch.device("meta"):
        sizes = [p.numel() for p in build(name, sequence).parameters()]
    return Census(sum(sizes), max(sizes))
