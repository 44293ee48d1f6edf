# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that needs no download."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers


def byte_tokenizer() -> Any:
    """One token for each byte, and two that mark padding and the end."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<pad>", "<eos>"])}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
