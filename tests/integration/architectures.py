# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many architectures of transformers, with random weights. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, INNER = 192, 384
"""Most weights are of 64 KiB at least: smaller ones do not go to NVMe."""

LAYERS = {
    "vocab_size": 256, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TWO_SIDED = {
    "vocab_size": 256, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = LAYERS | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH,
    "output_router_logits": True,
}  # fmt: skip
PATCHES = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
STATE_SPACE = {"vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8}

CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("cohere", "falcon", "gpt_neox", "granite", "olmo2", "phi3", "qwen2", "stablelm"), LAYERS),
    **dict.fromkeys(("gemma2", "gemma3_text", "glm", "qwen3"), LAYERS | {"head_dim": 16}),
    **dict.fromkeys(("mixtral", "olmoe"), EXPERTS),
    "bloom": {"vocab_size": 256, "hidden_size": WIDTH, "n_layer": 3, "n_head": 4},
    "deepseek_v3": LAYERS | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1,
    },
    "gpt_oss": EXPERTS | {"head_dim": 16},
    "mamba": STATE_SPACE,
    "mamba2": STATE_SPACE | {"num_heads": 8, "head_dim": 48, "n_groups": 1, "chunk_size": 8},
    "mpt": {"vocab_size": 256, "d_model": WIDTH, "n_layers": 2, "n_heads": 4},
    "opt": LAYERS | {"ffn_dim": INNER, "word_embed_proj_dim": 32, "layerdrop": 0.3},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": WIDTH, "decoder_sparse_step": 1},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "decoder_sparse_step": 1},
    "rwkv": {"vocab_size": 256, "hidden_size": WIDTH, "attention_hidden_size": WIDTH, "num_hidden_layers": 2,
             "context_length": 64},
    "xlnet": {"vocab_size": 256, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": INNER},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "modernbert"), LAYERS),
    **dict.fromkeys(("albert", "electra"), LAYERS | {"embedding_size": 32}),
    "deberta-v2": LAYERS | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"vocab_size": 256, "dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": INNER},
}
TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "bart": TWO_SIDED | {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3},
    "m2m_100": TWO_SIDED | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "t5": {"vocab_size": 256, "d_model": WIDTH, "d_kv": 48, "d_ff": INNER, "num_layers": 2, "num_heads": 4,
           "pad_token_id": 0, "decoder_start_token_id": 0},
}  # fmt: skip
IMAGES: dict[str, dict[str, Any]] = {
    "convnext": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.2},
    "dinov2": PATCHES,
    "mobilenet_v2": {"image_size": 32},
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "swin": {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
             "window_size": 4, "drop_path_rate": 0.2},
    "vit": PATCHES,
}  # fmt: skip

ARCHITECTURES = (*CAUSAL, *MASKED, *TO_SEQUENCE, *IMAGES)

BUILT_WHOLE = ("bart", "distilbert", "m2m_100", "mamba", "mamba2", "regnet", "resnet", "rwkv")
"""Their code looks at weights while it builds the model, which fails under ``zero.Init``."""


class Architecture(nn.Module):
    """One of :data:`ARCHITECTURES`. With dropout, where that is its default."""

    def __init__(self, name: str) -> None:
        super().__init__()
        auto, config = _auto_of(name)
        self.images = name in IMAGES
        self.model = auto.from_config(config)
        if name in BUILT_WHOLE:
            self.model.bfloat16()  # buffers too, which DeepSpeed leaves as they are
        _fill(self.model)

    def add_lora(self, rank: int) -> None:
        """Freezes the weights and adds low-rank adapters to all linear layers: in fp32, as PEFT does."""
        import peft

        refused = {"exclude_modules": ["out_proj"]} if self.model.config.model_type.startswith("mamba") else {}
        self.model = peft.get_peft_model(self.model, peft.LoraConfig(r=rank, target_modules="all-linear", **refused))

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        labels = torch.randint(0, 2, (2,), generator=generator)
        if self.images:
            return torch.randn(2, 3, 32, 32, generator=generator).bfloat16(), labels
        tokens = torch.randint(3, 250, (2, 16), generator=generator)
        return tokens, tokens

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.images:
            return self.model(pixel_values=inputs, labels=labels).loss
        return self.model(input_ids=inputs, labels=labels).loss


def _auto_of(name: str) -> tuple[Any, Any]:
    """The automatic class of an architecture, and its configuration."""
    import transformers

    for sizes_of, kind in (
        (CAUSAL, "CausalLM"), (MASKED, "MaskedLM"), (TO_SEQUENCE, "Seq2SeqLM"), (IMAGES, "ImageClassification")
    ):  # fmt: skip
        if name in sizes_of:
            auto = getattr(transformers, f"AutoModelFor{kind}")
            return auto, transformers.AutoConfig.for_model(name, **sizes_of[name])
    raise KeyError(name)


def import_code_of(model: str) -> None:
    """Imports what defines a model of :data:`MODELS`, which fails for some under ``zero.Init``."""
    if model in MODELS:
        auto, config = _auto_of(model.removeprefix("transformers/"))
        auto._model_mapping[type(config)]


def _fill(model: nn.Module) -> None:
    """Gives every weight a value: under ``zero.Init`` some architectures leave theirs as memory was."""
    import deepspeed

    for number, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        value = 0.05 * torch.randn(getattr(param, "ds_shape", param.shape), generator=generator)
        if value.dim() == 1 and "norm" in name.lower():
            value += 1
        with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
            param.data.copy_(value)


MODELS: dict[str, Callable[[], nn.Module]] = {
    f"transformers/{name}": (lambda name=name: Architecture(name)) for name in ARCHITECTURES
}
