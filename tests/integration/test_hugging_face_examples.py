# SPDX-License-Identifier: Apache-2.0
"""The scripts of ``examples/hugging_face`` run as their first lines say, on a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).parents[2] / "examples" / "hugging_face"
ACTIVATION_LINE = "is active with DeepSpeed"
TEXT = "Offloading moves what the GPU does not need now to where there is room for it. " * 20
TRAINER_OPTIONS = ["--max_steps", "2", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "1"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an example is given: the options that all of them have, and a folder for the rest."""

    harness: Any
    folder: Path

    @property
    def common(self) -> list[str]:
        return ["--model", str(self.folder / "model"), "--text", str(self.folder / "train.txt"), "--length", "16"]

    @property
    def config(self) -> str:
        return str(self.folder / "ds_config.json")

    def output(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def inputs(harness: Any) -> Inputs:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder: Path = harness.folder()
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "train.txt").write_text(TEXT)
    ds_config = json.loads((EXAMPLES / "ds_config.json").read_text())
    for section in ("offload_param", "offload_optimizer"):
        ds_config["zero_optimization"][section]["nvme_path"] = str(folder / "nvme")
    (folder / "ds_config.json").write_text(json.dumps(ds_config))
    return Inputs(harness, folder)


def test_trainer(inputs: Inputs) -> None:
    output = inputs.output("trainer")
    options = ["--deepspeed", inputs.config, "--output_dir", str(output), *TRAINER_OPTIONS]
    log = inputs.harness.launch(1, [str(EXAMPLES / "trainer.py"), *inputs.common, *options]).succeeded().log
    assert log.count(ACTIVATION_LINE) == 1
    assert "eval_loss" in log
    assert (output / "model.safetensors").exists()


def test_lora(inputs: Inputs) -> None:
    output = inputs.output("lora")
    options = ["--deepspeed", inputs.config, "--output_dir", str(output), "--rank", "2", *TRAINER_OPTIONS]
    # Without a launcher, as on one GPU.
    command = [sys.executable, str(EXAMPLES / "lora.py"), *inputs.common, *options]
    log = inputs.harness.execute(command).succeeded().log
    assert log.count(ACTIVATION_LINE) == 1
    assert (output / "adapter_model.safetensors").exists()


def test_accelerate_without_a_config_file(inputs: Inputs) -> None:
    """The launcher's options have no place for the engine's key: the environment asks for it."""
    output = inputs.output("accelerate")
    launcher = [
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "1",
        "--zero_stage", "3", "--offload_param_device", "cpu", "--offload_optimizer_device", "cpu",
        "--zero3_save_16bit_model", "true", "--mixed_precision", "bf16", "--main_process_port", "0",
    ]  # fmt: skip
    options = ["--output", str(output), "--steps", "2"]
    finished = inputs.harness.execute(
        [*launcher, str(EXAMPLES / "accelerate_loop.py"), *inputs.common, *options],
        ranks=0,
        env={"TENCACHE_ENABLE": "1"},
    ).succeeded()
    assert finished.log.count(ACTIVATION_LINE) == 1
    assert ", because TENCACHE_ENABLE is set: per rank" in finished.log
    assert "step 2: loss " in finished.log
    assert (output / "model.safetensors").exists()
    assert any((output / "state").iterdir())


def test_the_config_is_the_one_of_the_documentation() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "hugging_face.md").read_text()
    assert json.loads(page.split("```json\n")[1].split("```")[0]) == json.loads(
        (EXAMPLES / "ds_config.json").read_text()
    )
