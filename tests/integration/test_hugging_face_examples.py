# SPDX-License-Identifier: Apache-2.0
"""The scripts of ``examples`` run as their first lines say, on a tiny model; several in one process."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison.shared_buffers import remove_shared_buffers
from tests.integration.conftest import free_port

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
ACTIVATION_LINE = "is active with DeepSpeed"
BECAUSE = ", because TENCACHE_ENABLE is set: per rank"
TEXT = "Offloading moves what the GPU does not need now to where there is room for it. " * 20
TRAINER_OPTIONS = [
    "--max_steps", "2", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "1", "--bf16", "False",
    "--save_strategy", "no",
]  # fmt: skip
KINDS = ("PARAM", "OPTIMIZER")
DATA = {"prompt": "name a colour: ", "completion": "red", "chosen": "blue", "rejected": "seven"}
KEYS = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected"), "grpo": ("prompt",)}
GENERATION = [
    "--num_generations", "2", "--per_device_train_batch_size", "2", "--max_completion_length", "4",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """What examples are given: a model, data, configs and a folder."""

    harness: Any
    folder: Path

    def text_model(self) -> list[str]:
        return ["--model", str(self.folder / "model"), "--text", str(self.folder / "train.txt"), "--length", "16"]

    def trl_model(self, name: str) -> list[str]:
        path = self.folder / f"{name}.jsonl"
        path.write_text(f"{json.dumps({key: DATA[key] for key in KEYS[name]})}\n" * 8)
        return ["--model", str(self.folder / "model"), "--data", str(path)]

    def config(self, name: str = "hugging_face", *, engine: bool = True) -> str:
        """The config beside an example, with a folder of this machine; or the same without the engine's line."""
        config = json.loads((EXAMPLES / name / "ds_config.json").read_text())
        zero = config["zero_optimization"]
        for section in {"offload_param", "offload_optimizer"} & zero.keys():
            zero[section] = {"device": "nvme", "nvme_path": str(self.folder / "nvme")} if engine else {"device": "cpu"}
        if not engine:
            del zero["offload_engine"]
        path = self.folder / f"{name}-{engine}.json"
        path.write_text(json.dumps(config))
        return str(path)

    def output(self, name: str) -> Path:
        return self.folder / name

    def run(self, launcher: list[str], runs: list[dict[str, Any]], **env: str) -> list[str]:
        """What each script printed, of several run by one launcher."""
        path = self.harness.folder() / "runs.json"
        path.write_text(json.dumps(runs))
        command = [sys.executable, *launcher, str(HERE / "example_program.py"), str(path)]
        log = self.harness.execute(command, ranks=0, folder=path.parent, env=env, timeout_s=380).succeeded().log
        return re.split(r"^=== \d+\n", log, flags=re.MULTILINE)[1:]


@pytest.fixture(scope="module")
def inputs(harness: Any) -> Inputs:
    import transformers

    from tests.integration.byte_tokenizer import byte_tokenizer

    folder: Path = harness.folder()
    # With the wider one some weights are large enough for NVMe.
    for name, width in (("model", 64), ("wide_model", 256)):
        byte_tokenizer().save_pretrained(folder / name)
        config = transformers.LlamaConfig(
            vocab_size=258, hidden_size=width, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=257, pad_token_id=256,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    (folder / "train.txt").write_text(TEXT)
    return Inputs(harness, folder)


@pytest.fixture(scope="module")
def printed(inputs: Inputs) -> dict[str, str]:
    """By example, what it printed: all that train on one GPU, under torchrun."""
    folder = EXAMPLES / "hugging_face"
    options = {
        "trainer": inputs.text_model(),
        "lora": [*inputs.text_model(), "--rank", "2"],
        "sft": [*inputs.trl_model("sft"), "--max_length", "32"],
        "dpo": [*inputs.trl_model("dpo"), "--max_length", "32"],
        "grpo": [*inputs.trl_model("grpo"), *GENERATION],
    }
    runs = [
        {
            "script": str(folder / f"{name}.py"),
            "argv": [
                *of_script, "--deepspeed", inputs.config(), "--output_dir", str(inputs.output(name)), *TRAINER_OPTIONS
            ],
        }
        for name, of_script in options.items()
    ]  # fmt: skip
    small = ["--width", "64", "--layers", "2", "--steps", "2"]
    plain = EXAMPLES / "plain_deepspeed" / "train.py"
    runs.append({"script": str(plain), "argv": ["--deepspeed_config", inputs.config("plain_deepspeed"), *small]})
    generate = EXAMPLES / "inference" / "generate.py"
    prompts = [
        "--model",
        str(inputs.folder / "wide_model"),
        "--prompt",
        "name",
        "--prompt",
        "a colour",
        "--tokens",
        "4",
    ]
    runs.append({"script": str(generate), "argv": ["--deepspeed_config", inputs.config("inference"), *prompts]})
    port = str(free_port())
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", port]
    try:
        return dict(zip([*options, "plain_deepspeed", "generate"], inputs.run(launcher, runs), strict=True))
    finally:
        remove_shared_buffers(port)


@pytest.mark.parametrize(
    ("name", "engines", "saved"),
    [
        ("trainer", 1, "model.safetensors"),
        ("lora", 1, "adapter_model.safetensors"),
        ("sft", 1, "model.safetensors"),
        ("dpo", 2, "model.safetensors"),
        ("grpo", 1, "model.safetensors"),
    ],
)
def test_on_one_gpu(inputs: Inputs, printed: dict[str, str], name: str, engines: int, saved: str) -> None:
    assert printed[name].count(ACTIVATION_LINE) == engines
    assert (inputs.output(name) / saved).exists()
    assert len(re.findall(r"'loss': '?-?[\d.e-]+", printed[name])) == 2


def test_plain_deepspeed(printed: dict[str, str]) -> None:
    assert printed["plain_deepspeed"].count(ACTIVATION_LINE) == 1
    assert "step 2: loss " in printed["plain_deepspeed"]


def test_generate(printed: dict[str, str]) -> None:
    assert printed["generate"].count(ACTIVATION_LINE) == 1
    assert len(re.findall(r"^generated: '(name|a colour)", printed["generate"], re.MULTILINE)) == 2
    assert re.search(r"^[\d.]+ tokens/s$", printed["generate"], re.MULTILINE)


def accelerate_runs(inputs: Inputs, name: str, environments: list[dict[str, str]]) -> list[dict[str, Any]]:
    options = [*inputs.text_model(), "--steps", "3", "--output"]
    script = str(EXAMPLES / "hugging_face" / "accelerate_loop.py")
    return [
        {"script": script, "argv": [*options, str(inputs.output(f"{name}{index}"))], "env": env}
        for index, env in enumerate(environments)
    ]


def check_equal(inputs: Inputs, name: str, printed: list[str]) -> None:
    losses = [re.findall(r"^step \d: loss .*$", text, re.MULTILINE) for text in printed]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    models = [(inputs.output(f"{name}{index}") / "model.safetensors").read_bytes() for index in range(2)]
    assert models[0] == models[1]
    assert all(any((inputs.output(f"{name}{index}") / "state").iterdir()) for index in range(2))


@pytest.mark.long
def test_accelerate_on_two_ranks_without_a_config_file(inputs: Inputs) -> None:
    """The launcher's options have no place for the engine's key: the environment asks for it."""
    port = str(free_port())
    launcher = [
        "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2",
        "--zero_stage", "3", "--offload_param_device", "nvme", "--offload_optimizer_device", "nvme",
        "--zero3_save_16bit_model", "true", "--mixed_precision", "bf16", "--main_process_port", port,
    ]  # fmt: skip
    # accelerate 1.15 has options for the paths, and does not pass them on.
    paths = {f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_NVME_PATH": str(inputs.folder / "nvme") for kind in KINDS}
    # Without the variable the same options would be stock's NVMe offload; its CPU offload is the reference.
    stock = {f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_DEVICE": "cpu" for kind in KINDS}
    printed = inputs.run(launcher, accelerate_runs(inputs, "options", [{"TENCACHE_ENABLE": "1"} | paths, stock]))
    remove_shared_buffers(port)
    assert [text.count(ACTIVATION_LINE) for text in printed] == [1, 0]
    assert BECAUSE in printed[0]
    check_equal(inputs, "options", printed)


def test_accelerate_on_two_ranks_with_a_config_file(inputs: Inputs) -> None:
    """That of ``accelerate config``, which names DeepSpeed's."""
    config, port = inputs.folder / "accelerate.yaml", str(free_port())
    config.write_text(
        "distributed_type: DEEPSPEED\nmachine_rank: 0\nmain_training_function: main\nnum_machines: 1\n"
        f"num_processes: 2\nmain_process_port: {port}\n"
        f"deepspeed_config:\n  deepspeed_config_file: {inputs.config()}\n  zero3_init_flag: true\n"
    )
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    stock = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": inputs.config(engine=False)}
    printed = inputs.run(launcher, accelerate_runs(inputs, "file", [{}, stock]))
    remove_shared_buffers(port)
    assert [text.count(ACTIVATION_LINE) for text in printed] == [1, 0]
    check_equal(inputs, "file", printed)


def test_the_config_is_the_one_of_the_documentation() -> None:
    page = (EXAMPLES.parent / "docs" / "hugging_face.md").read_text()
    assert json.loads(page.split("```json\n")[1].split("```")[0]) == json.loads(
        (EXAMPLES / "hugging_face" / "ds_config.json").read_text()
    )
