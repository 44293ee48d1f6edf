# SPDX-License-Identifier: Apache-2.0
"""What users of accelerate do with DeepSpeed: scenarios like those of ``hugging_face_cases.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import accelerate
import torch
import training
import transformers
from hugging_face_cases import SMALL_WEIGHTS_TOO, TRAIN, Case, file_digests, tensor_digests


def prepared(
    case: Case, accelerator: Any, *, dummy: bool = False, batch_size: int = 2, data: Any = TRAIN, **loading: Any
) -> tuple[Any, Any, Any]:
    """Model, optimizer and data, as a script prepares them. ``loading``: further options of the data loader."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = (accelerate.utils.DummyOptim if dummy else torch.optim.AdamW)(trained, lr=1e-2, weight_decay=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size, num_workers=1, **loading)
    return accelerator.prepare(model, optimizer, loader)


def train(case: Case, accelerator: Any, model: Any, optimizer: Any, batches: Iterator[Any], steps: int) -> None:
    model.train()
    for _ in range(steps):
        with accelerator.accumulate(model):
            loss = model(**next(batches), use_cache=False).loss
            case.seen["losses"].append(float(loss.detach()).hex())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_saves_and_loads(case: Case) -> None:
    """With a dict as config: back to a saved state, and on from there."""
    config = case.config() | {"gradient_accumulation_steps": 2}
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    model, optimizer, loader = prepared(case, accelerator)
    case.check_engine(model)
    batches = iter(loader)
    train(case, accelerator, model, optimizer, batches, 4)
    accelerator.save_state(str(case.folder / "state"))
    at_save = training.digests(model.module)
    kept = [next(batches) for _ in range(4)]
    train(case, accelerator, model, optimizer, iter(kept), 4)
    case.seen["weights"] = training.digests(model.module)
    case.seen["state dict"] = tensor_digests(accelerator.get_state_dict(model))
    accelerator.unwrap_model(model).save_pretrained(
        case.folder / "saved", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    case.seen["saved"] = file_digests(case.folder / "saved") if case.rank == 0 else {}
    accelerator.load_state(str(case.folder / "state"))
    assert training.digests(model.module) == at_save
    if case.engine == "stock":  # the run that never stopped is the oracle
        case.seen["losses"] += case.seen["losses"][-4:]
        case.seen["weights again"] = case.seen["weights"]
    else:
        train(case, accelerator, model, optimizer, iter(kept), 4)
        case.seen["weights again"] = training.digests(model.module)
    accelerator.free_memory()


def accelerate_config_file(case: Case) -> None:
    """With a file as config and the optimizer in it; then everything is freed and trained again."""
    path = case.folder / f"ds_config_{case.rank}.json"
    config = case.config(**SMALL_WEIGHTS_TOO)
    path.write_text(json.dumps(config | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}))
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=str(path))
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    for _ in range(2):
        model, optimizer, loader = prepared(case, accelerator, dummy=True)
        case.check_engine(model)
        train(case, accelerator, model, optimizer, iter(loader), 3)
        case.seen["weights"] = training.digests(model.module)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    assert case.seen["losses"][:3] == case.seen["losses"][3:]


def accelerate_two_plugins(case: Case) -> None:
    """A student that is trained and a teacher that only runs forward, both partitioned."""
    configs = {
        "student": case.config(),
        "teacher": case.config(**SMALL_WEIGHTS_TOO) | {"train_micro_batch_size_per_gpu": 2},
    }
    plugins = {name: accelerate.DeepSpeedPlugin(hf_ds_config=config) for name, config in configs.items()}
    accelerator = accelerate.Accelerator(deepspeed_plugins=plugins, mixed_precision="bf16")
    accelerator.state.select_deepspeed_plugin("student")
    student, optimizer, loader = prepared(case, accelerator)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher_accelerator = accelerate.Accelerator()
    torch.manual_seed(8)
    teacher = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)
    teacher = teacher_accelerator.prepare(teacher)
    teacher.eval()
    for engine in (student, teacher):
        case.check_engine(engine)
    batches = iter(loader)
    for _ in range(3):
        batch = next(batches)
        with torch.no_grad():
            wanted = teacher(**batch, use_cache=False).logits.float()
        logits = student(**batch, use_cache=False).logits.float()
        # The two begin as one model: the targets are shifted, so that there is something to learn.
        loss = torch.nn.functional.mse_loss(logits, wanted.roll(1, dims=-1))
        case.seen["losses"].append(float(loss.detach()).hex())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    case.seen["weights"] = training.digests(student.module)
    case.seen["teacher"] = training.digests(teacher.module)
    accelerator.free_memory()
    teacher_accelerator.free_memory()


def accelerate_finds_a_batch_size(case: Case) -> None:
    """Memory runs out in the middle of a forward pass: everything is built again for half the batch.

    (``auto_find_batch_size`` of the Trainer refuses ZeRO-3.)
    """
    config = case.config(**SMALL_WEIGHTS_TOO)
    accelerator = accelerate.Accelerator(
        deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config), mixed_precision="bf16"
    )
    tried = []

    def run_out_of_memory(module: Any, inputs: tuple[torch.Tensor]) -> None:
        if tried[-1] > 2 and len(case.seen["losses"]) == 1:  # in the second step, then in the first
            torch.empty(2**55, dtype=torch.uint8)

    @accelerate.utils.find_executable_batch_size(starting_batch_size=4)
    def train_with(batch_size: int) -> None:
        tried.append(batch_size)
        accelerator.free_memory()
        # "auto" is filled in once, by the first prepare().
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = batch_size
        accelerator.state.deepspeed_plugin.deepspeed_config["train_batch_size"] = batch_size * accelerator.num_processes
        model, optimizer, loader = prepared(case, accelerator, batch_size=batch_size)
        case.check_engine(model)
        model.module.model.layers[1].mlp.register_forward_pre_hook(run_out_of_memory)
        train(case, accelerator, model, optimizer, iter(loader), 3)
        case.seen["weights"] = training.digests(model.module)

    train_with()
    case.seen["batch sizes"] = tried
    accelerator.free_memory()


def accelerate_with_spawned_workers(case: Case) -> None:
    """Data is loaded by processes that know nothing of this one, and that stay from epoch to epoch."""
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=case.config(**SMALL_WEIGHTS_TOO))
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    model, optimizer, loader = prepared(
        case, accelerator, data=torch.utils.data.TensorDataset(TRAIN.rows[:4]),
        multiprocessing_context="spawn", persistent_workers=True,
    )  # fmt: skip
    case.check_engine(model)
    # As in a notebook: a worker would otherwise import this program, and with it everything.
    with mock.patch.object(sys.modules["__main__"], "__file__", None):
        for _ in range(2):
            batches = ({"input_ids": rows, "labels": rows} for (rows,) in loader)
            train(case, accelerator, model, optimizer, batches, len(loader))
    case.seen["weights"] = training.digests(model.module)
    accelerator.free_memory()


SCENARIOS = {
    function.__name__: function
    for function in (
        accelerate_saves_and_loads, accelerate_config_file, accelerate_two_plugins, accelerate_finds_a_batch_size,
        accelerate_with_spawned_workers,
    )
}  # fmt: skip
