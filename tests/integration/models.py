# SPDX-License-Identifier: Apache-2.0
"""Small models that between them do what makes offloading hard: each makes its own batches and returns its loss."""

from __future__ import annotations

from collections.abc import Callable

import architectures
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.width = width

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        x = torch.randn(4, self.width, generator=generator)
        return x, x.roll(1, dims=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtype = self.layers[0].weight.dtype
        x = x.to(dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(x.float(), y.float().to(x.device))


class RandomSkip(Mlp):
    """Skips some layers, differently in every step, the same on every rank."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtype = self.layers[0].weight.dtype
        x = x.to(dtype)
        if self.training:
            self.calls += 1
        for index, layer in enumerate(self.layers):
            if (self.calls * 7 + index * 3) % 5 != 0:
                x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(x.float(), y.float().to(x.device))


class Unused(Mlp):
    """Has a weight that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(512, 512)


class Tied(nn.Module):
    """Input and output embedding are one weight, used in two modules."""

    def __init__(self, vocabulary: int = 1024, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.vocabulary = vocabulary

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(0, self.vocabulary, (4, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.embedding(x)))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), y.flatten())


class External(nn.Module):
    """A module that uses another module's weight directly."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.width = width

    batch = Mlp.batch

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(self.second.bias.dtype)
        x = torch.tanh(self.first(x))
        x = x + nn.functional.linear(self.second(x), self.first.weight)
        return nn.functional.mse_loss(x.float(), y.float().to(x.device))


class ExternalInEvaluation(External):
    """In evaluation only it uses a weight before the module that has it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).dtype)  # which looks no weight up
        if not self.training:
            x = x + nn.functional.linear(x, self.second.weight)
        x = self.second(torch.tanh(self.first(x)))
        return nn.functional.mse_loss(x.float(), y.float().to(x.device))


class Experts(nn.Module):
    """A mixture of experts of which some get no token."""

    def __init__(self, width: int = 256, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.gate(x).argmax(dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index).unsqueeze(-1)
            if bool(chosen.any()):
                out = out + chosen.to(x.dtype) * expert(x)
        return out + 0 * self.gate(x).sum()


class MoeLeaf(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.moe = Experts(width)
        self.outer = nn.Linear(width, width)
        self.width = width

    batch = Mlp.batch

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.to(self.inner.weight.dtype))
        x = self.outer(x + self.moe(x))
        return nn.functional.mse_loss(x.float(), y.float().to(x.device))


class Residual(Mlp):
    """Layers with dropout, views and an operation in place, under one kind of checkpointing or none."""

    def __init__(self, checkpointing: str = "") -> None:
        super().__init__(width=256, depth=5)
        self.checkpointing = checkpointing
        self.breaks = ""

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        x = torch.randn(32, self.width, generator=generator)
        return x, x.roll(1, dims=1)

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.tanh(layer(x)).chunk(2, dim=1)
        mixed = nn.functional.dropout(torch.cat((right.t().contiguous().t(), left), dim=1), 0.1)
        return nn.functional.leaky_relu(x + mixed, 0.3, inplace=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        import deepspeed

        x = x.to(self.layers[0].weight.dtype).requires_grad_()
        for index, layer in enumerate(self.layers):
            if self.breaks == "exception" and index == 3:
                raise ZeroDivisionError
            if self.checkpointing == "deepspeed":
                x = deepspeed.checkpointing.checkpoint(lambda h, layer=layer: self.block(layer, h), x)
            elif self.checkpointing:
                x = checkpoint(self.block, layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = self.block(layer, x)
            if self.breaks == "inplace" and index == 2:
                scaled = torch.sigmoid(x)
                x = x + scaled
                scaled.mul_(2)
        return nn.functional.mse_loss(x.float(), y.float().to(x.device))


class HuggingFace(nn.Module):
    """A causal language model of transformers, made from a config (nothing is downloaded)."""

    def __init__(self, kind: str, checkpointing: str = "", width: int = 256, layers: int = 3) -> None:
        super().__init__()
        import transformers

        self.vocabulary = 1024
        if kind in ("llama", "olmo2"):
            sizes = {
                "vocab_size": self.vocabulary, "hidden_size": width, "intermediate_size": 2 * width,
                "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 64, "pad_token_id": None,
            }  # fmt: skip
            config = transformers.AutoConfig.for_model(kind, **sizes)
            self.model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            config = transformers.GPT2Config(
                vocab_size=self.vocabulary, n_embd=width, n_layer=layers, n_head=4, n_positions=64, pad_token_id=None,
                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            )  # fmt: skip
            self.model = transformers.GPT2LMHeadModel(config)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            self.model.enable_input_require_grads()

    def add_lora(self, rank: int) -> None:
        """Freezes the weights and adds low-rank adapters, as a fine-tuning script does after loading."""
        import peft

        adapter = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "down_proj"])
        self.model = peft.get_peft_model(self.model, adapter)

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        # Few: every weight gets a gradient all the same, and matrix products in bf16 take most of a step on a CPU.
        tokens = torch.randint(0, self.vocabulary, (2, 8), generator=generator)
        return (tokens,)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


class VisionTransformer(nn.Module):
    def __init__(self, checkpointing: bool = False, width: int = 256) -> None:
        super().__init__()
        import transformers

        config = transformers.ViTConfig(
            hidden_size=width, num_hidden_layers=3, num_attention_heads=4, intermediate_size=2 * width, image_size=32,
            patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = transformers.ViTForImageClassification(config)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return torch.randn(2, 3, 32, 32, generator=generator), torch.randint(0, 10, (2,), generator=generator)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=x.to(next(self.parameters()).dtype), labels=y).loss.float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "mlp_wide": lambda: Mlp(width=1024, depth=8),
    "mlp_deep": lambda: Mlp(width=1024, depth=32),
    "random_skip": RandomSkip,
    "unused": Unused,
    "tied": Tied,
    "external": External,
    "external_in_evaluation": ExternalInEvaluation,
    "moe_leaf": MoeLeaf,
    "residual": Residual,
    "residual_reentrant": lambda: Residual("reentrant"),
    "residual_nonreentrant": lambda: Residual("nonreentrant"),
    "residual_deepspeed": lambda: Residual("deepspeed"),
    "llama": lambda: HuggingFace("llama"),
    "llama_reentrant": lambda: HuggingFace("llama", checkpointing="reentrant"),
    "llama_nonreentrant": lambda: HuggingFace("llama", checkpointing="nonreentrant"),
    "gpt2": lambda: HuggingFace("gpt2"),
    # Attention and the residual connection use the same tensor: the order of their gradients' sum shows.
    "post_norm": lambda: HuggingFace("olmo2"),
    "vit": VisionTransformer,
    # Wide enough for stock NVMe offload to move the weights: it leaves those below 1 MiB in host memory.
    "llama_checkpointed_wide": lambda: HuggingFace("llama", checkpointing="nonreentrant", width=768),
    "llama_reentrant_wide": lambda: HuggingFace("llama", checkpointing="reentrant", width=768),
    "gpt2_checkpointed_wide": lambda: HuggingFace("gpt2", checkpointing="nonreentrant", width=768),
    "gpt2_wide": lambda: HuggingFace("gpt2", width=768),
    "vit_wide": lambda: VisionTransformer(width=768),
    "vit_checkpointed_wide": lambda: VisionTransformer(checkpointing=True, width=768),
} | architectures.MODELS
