# SPDX-License-Identifier: Apache-2.0
"""What users of transformers and PEFT do with DeepSpeed: one scenario per case of
``hugging_face_program.py``.

The scripts are those a user writes; with "tencache" the config has weights and optimizer state on NVMe and the line
that asks for it. A scenario returns everything a user would see; ``test_hugging_face.py`` compares it between the
engines. Models are made from configs and nothing is downloaded.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import peft
import torch
import training
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from user_api_cases import value_of

VOCABULARY = 2048  # of the weights only those of 100,000 elements go to NVMe while DeepSpeed's threshold is "auto"
SMALL_WEIGHTS_TOO = {"stage3_param_persistence_threshold": 100}
SEQUENCE = 8
WIDE = 512
"""Width of a model with adapters: a weight is below the size that goes to NVMe on most of the others."""
KEPT_METRICS = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "test_loss")


class Tokens(torch.utils.data.Dataset):
    """Random sequences, each the same whichever process and worker asks for it."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


TRAIN, EVALUATION = Tokens(32, 1), Tokens(8, 2)


def model_config(width: int = 64) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip


def ds_config(engine: str, folder: str, *, automatic: bool = True, **zero: Any) -> dict[str, Any]:
    """A config as the documentation of transformers shows it; without "auto" where nobody fills it in.

    ``zero`` are further keys of ``zero_optimization``.
    """
    section = {"device": "cpu"} if engine == "stock" else {"device": "nvme", "nvme_path": os.path.join(folder, "nvme")}
    hidden_size = model_config().hidden_size
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto" if automatic else True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(section),
            "offload_optimizer": dict(section),
            "sub_group_size": 20_000,
            "reduce_bucket_size": "auto" if automatic else hidden_size**2,
            "stage3_prefetch_bucket_size": "auto" if automatic else hidden_size**2,
            "stage3_param_persistence_threshold": "auto" if automatic else 10 * hidden_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        | zero,
        "gradient_clipping": "auto" if automatic else 1.0,
        "train_micro_batch_size_per_gpu": "auto" if automatic else 2,
    }
    if automatic:
        config |= {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    if engine == "tencache":
        config["zero_optimization"]["offload_engine"] = "tencache"
        config["tencache"] = {"host_memory": 0, "chunk_size": 2**16, "poison_buffers": True}
    return config


def with_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """The config with optimizer and scheduler, whose values come from the script."""
    schedule = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    return config | {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(schedule, "auto")},
    }


class Case:
    """The folders of one scenario, what it has seen, and whether TenCache was in use."""

    def __init__(self, engine: str, folder: str, rank: int, name: str) -> None:
        self.engine = engine
        self.rank = rank
        self.shared = Path(folder)
        self.folder = self.shared / f"{name}-{engine}"
        self.folder.mkdir(exist_ok=True)
        self.seen: dict[str, Any] = {"losses": [], "facts": {}}

    def config(self, **options: Any) -> dict[str, Any]:
        return ds_config(self.engine, str(self.shared), **options)

    def check_engine(self, engine: Any) -> None:
        """The engine is the one that the config asks for, and has weights on NVMe, or in the memory of a GPU."""
        ours = getattr(engine.optimizer, "tencache", None)
        assert (ours is not None) == (self.engine == "tencache")
        if ours is not None:
            on_nvme = any(home.on_nvme for part in ours.all() for home in part.weights.homes.all())
            assert on_nvme or ours.stats().gpu_weight_nbytes > 0

    def model_folder(self, width: int = 64) -> str:
        """A model that was saved before, without DeepSpeed."""
        path = self.shared / f"model-{width}"
        if self.rank == 0 and not path.exists():
            torch.manual_seed(7)
            transformers.LlamaForCausalLM(model_config(width)).to(torch.bfloat16).save_pretrained(path)
        deepspeed.comm.barrier()
        return str(path)


def file_digests(folder: Path) -> dict[str, str]:
    """A hash of every tensor in the model files of a folder."""
    digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            value = tensor.contiguous().view(torch.uint8).numpy()
            digests[name] = hashlib.sha256(value.tobytes()).hexdigest()
    return digests


def tensor_digests(state: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    return {name: value_of(tensor) for name, tensor in (state or {}).items()}


# Trainer


class Recording:
    """A trainer that keeps the exact loss of each micro-step, which the log rounds."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__(**options)
        self.case = case

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.case.seen["losses"].append(float(loss).hex())
        return loss


class RecordingTrainer(Recording, transformers.Trainer):
    pass


def arguments(
    case: Case, zero: dict[str, Any] | None = None, kind: Any = transformers.TrainingArguments, **options: Any
) -> Any:
    settings = {
        "output_dir": str(case.folder), "deepspeed": with_optimizer(case.config(**zero or {})), "bf16": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.01, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "dataloader_num_workers": 1, "disable_tqdm": True, "seed": 11,
        "accelerator_config": {"use_configured_state": True},
    } | options  # fmt: skip
    # It asks for a GPU with bf16, which DeepSpeed's CPU accelerator can do without.
    with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True):
        return kind(**settings)


def trainer_for(case: Case, **options: Any) -> RecordingTrainer:
    args = arguments(case, **options)  # before the model is loaded: from then on from_pretrained partitions it
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)
    assert all(hasattr(param, "ds_id") for param in model.parameters())
    return RecordingTrainer(case, model=model, args=args, train_dataset=TRAIN, eval_dataset=EVALUATION)


def metrics_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: entry[key] for key in KEPT_METRICS if key in entry} for entry in entries]


def look_at(case: Case, trainer: RecordingTrainer) -> None:
    """What a user sees of a trained model: the log, evaluation, prediction, weights and the saved model."""
    case.check_engine(trainer.deepspeed)
    case.seen["log"] = metrics_of(trainer.state.log_history)
    case.seen["evaluation"] = metrics_of([trainer.evaluate()])
    predicted = trainer.predict(EVALUATION)
    case.seen["prediction"] = value_of(torch.from_numpy(predicted.predictions))
    case.seen["test metrics"] = metrics_of([predicted.metrics])
    case.seen["weights"] = training.digests(trainer.deepspeed.module)
    trainer.save_model(str(case.folder / "saved"))
    deepspeed.comm.barrier()
    case.seen["saved"] = file_digests(case.folder / "saved")
    trainer.accelerator.free_memory()


def trainer_trains(case: Case) -> None:
    """With a checkpoint in the middle and evaluations."""
    trainer = trainer_for(case, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    trainer.train()
    look_at(case, trainer)


def trainer_resumes(case: Case, saved_by: str | None = None) -> None:
    """Continues from the middle of the previous scenario; to be compared with the run that never stopped."""
    earlier = case.shared / f"trainer_trains-{saved_by or case.engine}"
    trainer = trainer_for(case, eval_strategy="steps", eval_steps=2)
    trainer.train(resume_from_checkpoint=str(earlier / "checkpoint-2"))
    look_at(case, trainer)


def trainer_resumes_from_stock(case: Case) -> None:
    """The line is added to the config in the middle of a run."""
    trainer_resumes(case, saved_by="stock")


def trainer_takes_the_best_model(case: Case) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    # Random tokens cannot be foretold: the loss of the evaluation rises, and the first checkpoint is the best.
    trainer = trainer_for(case, load_best_model_at_end=True, **options)
    trainer.train()
    case.seen["best"] = os.path.basename(trainer.state.best_model_checkpoint)
    look_at(case, trainer)


def trainer_only_predicts(case: Case) -> None:
    """Without training: DeepSpeed's engine has no optimizer."""
    trainer = trainer_for(case, zero=SMALL_WEIGHTS_TOO)
    predicted = trainer.predict(EVALUATION)
    case.check_engine(trainer.deepspeed)
    case.seen["prediction"] = value_of(torch.from_numpy(predicted.predictions))
    if case.engine == "tencache":
        import tencache_ds

        stats = tencache_ds.stats(trainer.deepspeed)
        case.seen["facts"] |= {
            "passes": stats.total.step, "read_nbytes": stats.last_step.nbytes["nvme_read"],
            "line": trainer.deepspeed.optimizer.tencache.describe(),
        }  # fmt: skip
    case.seen["weights"] = training.digests(trainer.model_wrapped.module)
    trainer.accelerator.free_memory()


def trainer_predicts_from_memory(case: Case) -> None:
    """Without training and without NVMe: there is nothing for TenCache to do."""
    config = case.config()
    config["zero_optimization"] |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    trainer = trainer_for(case, deepspeed=with_optimizer(config))
    case.seen["prediction"] = value_of(torch.from_numpy(trainer.predict(EVALUATION).predictions))
    if case.engine == "tencache":
        import tencache_ds

        try:
            tencache_ds.stats(trainer.deepspeed)
        except ValueError as error:
            case.seen["facts"] = {"error": str(error)}
    trainer.accelerator.free_memory()


def trainer_trains_twice(case: Case) -> None:
    """As in a notebook: a second trainer in the same process, after the first one was dropped."""
    for _ in range(2):
        trainer = trainer_for(case, max_steps=2, dataloader_num_workers=0)
        trainer.train()
        case.check_engine(trainer.deepspeed)
        trainer.accelerator.free_memory()
        dropped = weakref.ref(trainer.model)
        del trainer
        begin_anew()
        assert dropped() is None or case.engine == "stock"


def trainer_trains_in_8_bits(case: Case) -> None:
    """With the Trainer's name of bitsandbytes' optimizer, which it asks for embeddings in 32 bits. The norms, a group
    of their own, have as many elements as 8-bit moments begin with."""
    config = case.config() | {"zero_force_ds_cpu_optimizer": False}
    args = arguments(case, deepspeed=config, optim="adamw_bnb_8bit")
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(model_config(1024))
    trainer = RecordingTrainer(case, model=model, args=args, train_dataset=TRAIN)
    trainer.train()
    case.check_engine(trainer.deepspeed)
    if case.engine == "tencache":
        case.seen["facts"]["kinds"] = trainer.deepspeed.optimizer._state.kinds(0)
    case.seen["weights"] = training.digests(trainer.deepspeed.module)
    trainer.accelerator.free_memory()


# transformers without its Trainer


def from_pretrained_and_generate(case: Case) -> None:
    """A custom script: weights loaded under ZeRO-3, trained, and used for generation in between."""
    config = case.config(automatic=False)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    kept = HfDeepSpeedConfig(config)  # has to live until the model is loaded
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)
    del kept
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    case.check_engine(engine)
    case.seen["loaded"] = training.digests(engine.module)
    case.seen["expected"] = file_digests(Path(case.model_folder()))
    prompt = TRAIN.rows[:2, :4].to(engine.device)
    for step in range(3):
        engine.train()
        batch = TRAIN.rows[2 * step : 2 * step + 2].to(engine.device)
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        case.seen["losses"].append(float(loss.detach()).hex())
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            created = engine.module.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        case.seen[f"generated {step}"] = created.tolist()
    case.seen["weights"] = training.digests(engine.module)
    engine.destroy()


# PEFT


def lora_model(case: Case) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)
    torch.manual_seed(9)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, adapter)


def lora_trains_and_merges(case: Case) -> None:
    """Adapters on a frozen base, with the Trainer; saved, loaded without DeepSpeed, merged and used."""
    args = arguments(case, zero=SMALL_WEIGHTS_TOO, dataloader_num_workers=0)
    trainer = RecordingTrainer(case, model=lora_model(case), args=args, train_dataset=TRAIN, eval_dataset=EVALUATION)
    trainer.train()
    case.check_engine(trainer.deepspeed)
    if case.engine == "tencache":
        import tencache_ds

        step = tencache_ds.stats(trainer.deepspeed).last_step
        case.seen["facts"] |= {
            "read_nbytes": step.nbytes["nvme_read"], "written_nbytes": step.nbytes["nvme_write"],
            "base_nbytes": 2 * sum(p.ds_numel for p in trainer.model.parameters() if not p.requires_grad),
        }  # fmt: skip
    case.seen["log"] = metrics_of(trainer.state.log_history)
    case.seen["evaluation"] = metrics_of([trainer.evaluate()])
    case.seen["weights"] = training.digests(trainer.deepspeed.module)
    trainer.save_model(str(case.folder / "adapter"))
    deepspeed.comm.barrier()
    trainer.accelerator.free_memory()
    del trainer, args
    begin_anew()
    case.seen["adapter"] = file_digests(case.folder / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(), dtype=torch.bfloat16)
    with torch.no_grad():
        plain = base(EVALUATION.rows).logits
        model = peft.PeftModel.from_pretrained(base, str(case.folder / "adapter"))
        adapted = model(EVALUATION.rows).logits
        merged = model.merge_and_unload()
        case.seen["logits"] = [value_of(adapted), value_of(merged(EVALUATION.rows).logits)]
    assert not torch.equal(adapted, plain)
    case.seen["merged"] = tensor_digests(dict(merged.named_parameters()))


class Fp32Head(torch.nn.Linear):
    """An output layer that computes in single precision, where its weight still has that."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.to(self.weight.dtype))


def adapts(case: Case, *, head_trained: bool, resumes: bool = False, **adapters: Any) -> None:
    """Trains a frozen model with an output layer in fp32 that took the place of its own after loading, or with adapters
    beside both, all large enough for NVMe; predicts, generates and saves.

    Args:
        case: of the scenario.
        head_trained: whether the output layer is.
        resumes: whether the run also goes on from a checkpoint.
        adapters: PEFT's options; none: without adapters.
    """
    config = with_optimizer(case.config(**SMALL_WEIGHTS_TOO, sub_group_size=10**6))
    if case.engine == "tencache":
        config["tencache"]["chunk_size"] = 2**20
    options = {"deepspeed": config, "dataloader_num_workers": 0, "max_steps": 3}
    if resumes:
        options |= {"save_strategy": "steps", "save_steps": 2}

    def trainer_of() -> RecordingTrainer:
        args = arguments(case, **copy.deepcopy(options))
        model = transformers.AutoModelForCausalLM.from_pretrained(case.model_folder(WIDE), dtype=torch.bfloat16)
        torch.manual_seed(9)
        model.requires_grad_(False)
        model.lm_head = Fp32Head(WIDE, VOCABULARY, bias=False, dtype=torch.float32).requires_grad_(head_trained)
        if adapters:
            rank = 64 * deepspeed.comm.get_world_size()  # shards of 64 KiB in the model's dtype
            model = peft.get_peft_model(model, peft.LoraConfig(r=rank, task_type="CAUSAL_LM", **adapters))
        return RecordingTrainer(case, model=model, args=args, train_dataset=TRAIN, eval_dataset=EVALUATION)

    trainer = trainer_of()
    trainer.train()
    case.check_engine(trainer.deepspeed)
    if case.engine == "tencache":
        homes = [home for part in trainer.deepspeed.optimizer.tencache.all() for home in part.weights.homes.all()]
        ids = {param.ds_id for param in trainer.model.parameters() if param.requires_grad}
        case.seen["facts"]["trained in the tier"] = sum(home.key in ids for home in homes)
    with torch.no_grad():
        prompt = TRAIN.rows[:2, :4].to(trainer.args.device)
        created = trainer.model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False, synced_gpus=True)
    case.seen["generated"] = created.tolist()
    look_at(case, trainer)
    if not resumes or case.engine == "stock":  # which recomputes the powers of Adam's betas
        return
    ended = {key: case.seen[key] for key in ("losses", "weights", "saved", "evaluation", "prediction")}
    del trainer
    begin_anew()
    case.seen["losses"] = ended["losses"][:4]
    trainer = trainer_of()
    trainer.train(resume_from_checkpoint=str(case.folder / "checkpoint-2"))
    look_at(case, trainer)
    assert {key: case.seen[key] for key in ended} == ended, "the resumed run differs"


def lora_of_every_linear(case: Case) -> None:
    """Beside a frozen weight in fp32."""
    adapts(case, head_trained=False, target_modules="all-linear", exclude_modules=["lm_head"])


def lora_of_queries(case: Case) -> None:
    """And a copy of the output layer, which is trained and saved with the adapters."""
    adapts(case, head_trained=False, resumes=True, target_modules=["q_proj"], modules_to_save=["lm_head"])


def fp32_head(case: Case) -> None:
    adapts(case, head_trained=True)


# Running

SCENARIOS: dict[str, Callable[[Case], None]] = {
    function.__name__: function
    for function in (
        trainer_trains, trainer_resumes, trainer_resumes_from_stock, trainer_takes_the_best_model,
        trainer_only_predicts, trainer_predicts_from_memory, trainer_trains_twice, trainer_trains_in_8_bits,
        from_pretrained_and_generate, lora_trains_and_merges, lora_of_every_linear, lora_of_queries,
        fp32_head,
    )
}  # fmt: skip


def forget() -> None:
    """Makes accelerate and transformers forget what they keep for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    gc.collect()


def begin_anew() -> None:
    """As at the start of a process that accelerate's launcher has made for DeepSpeed."""
    forget()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as accelerate's launcher sets it
    join_ranks()


def join_ranks() -> None:
    """Without a backend accelerate would treat each rank on the CPU as a separate job."""
    PartialState(backend=None if torch.cuda.is_available() else "gloo")
