# SPDX-License-Identifier: Apache-2.0
"""The parts of the comparison that need no framework."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.frameworks.__main__ import main, names
from tests.frameworks.comparison import Comparison, Run, metrics, reason_in, saved, table
from tests.frameworks.environment import reason, replaced
from tests.frameworks.training import config_for

HERE = Path(__file__).parent
LOG = """\
  0%|          | 0/5 [00:00<?, ?it/s]{'loss': '5.559', 'grad_norm': '4.106', 'learning_rate': '0.001', 'epoch': '0.06'}
{'eval_loss': 5.2, 'eval_runtime': 0.31, 'epoch': 1.0}
{'train_runtime': 7.1, 'train_loss': 5.19}
a {loss} of 3
{'loss': 5.274, 'token_acc': 0.19, 'memory(GiB)': 1.5, 'train_speed(s/it)': 2.2}
"""
RUN = Run(0, ({"loss": 5.5}, {"loss": 5.0}), {"model.safetensors": "a1"}, 1, 1, "done")
STOCK = dataclasses.replace(RUN, n_active=0, n_summaries=0)


def compared(ours: Run, stock: Run = STOCK) -> Comparison:
    return Comparison("trl", "trl 1.16.0", {"stock": stock, "tencache": ours})


def test_metrics_of_a_log():
    assert metrics(LOG) == [
        {"loss": 5.559, "grad_norm": 4.106, "learning_rate": 0.001},
        {"eval_loss": 5.2},
        {"train_loss": 5.19},
        {"loss": 5.274, "token_acc": 0.19},
    ]


def test_saved_weights(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    assert list(saved(tmp_path)) == ["checkpoint-5/model.safetensors"]
    before = saved(tmp_path)
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"Weights")
    assert saved(tmp_path) != before


def test_equal_runs():
    assert compared(RUN).complaints() == []
    assert "| trl | trl 1.16.0 | 2 | 5.0 | 1 | identical |" in table([compared(RUN)])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"code": 1}, "tencache ended with exit status 1: done"),
        ({"code": None}, "tencache ended with a time-out: done"),
        ({"metrics": ({"loss": 5.5}, {"loss": 5.01})}, "step 2: {'loss': 5.0}, with TenCache {'loss': 5.01}"),
        ({"metrics": ({"loss": 5.5},)}, "2 lines, with TenCache 1"),
        ({"saved": {"model.safetensors": "b2"}}, "saved weights differ: model.safetensors"),
        ({"saved": {}}, "saved weights differ: model.safetensors"),
        ({"n_active": 0}, "the activation line was printed 0 times"),
        ({"n_summaries": 2}, "the summary was printed 2 times"),
    ],
)
def test_a_difference_is_a_complaint(change, complaint):
    found = compared(dataclasses.replace(RUN, **change)).complaints()
    assert len(found) == 1
    assert complaint in found[0]


def test_runs_that_show_nothing_are_not_equal():
    empty = dataclasses.replace(RUN, metrics=(), saved={})
    found = compared(empty, dataclasses.replace(empty, n_active=0, n_summaries=0)).complaints()
    assert found == ["stock's log has no loss", "stock saved no weights"]
    assert compared(RUN, RUN).complaints() == ["TenCache was active in stock's run"]


def test_requirements_are_replaced():
    lines = ["# pins", "ms_swift==4.6.0  # newest", "", "DeepSpeed==0.19.8", "torch==2.13.0"]
    assert replaced(lines, ["deepspeed==0.18.9"]) == ["ms_swift==4.6.0", "torch==2.13.0", "deepspeed==0.18.9"]
    assert replaced(lines, ["ms-swift<4"]) == ["DeepSpeed==0.19.8", "torch==2.13.0", "ms-swift<4"]


def test_the_reason_in_the_output_of_pip():
    assert reason("WARNING: old\nERROR: Cannot install a and b.\nmore\nERROR: ResolutionImpossible\n") == (
        "Cannot install a and b. ResolutionImpossible"
    )
    assert reason("killed") == "killed"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("step 1\n[rank0]: ValueError: no GPU\nraise CalledProcessError\nCalledProcessError: 1\nW: old\n",
         "[rank0]: ValueError: no GPU"),
        ("  assert n > 0\nAssertionError\n", "AssertionError"),
        ("torch.cuda.OutOfMemoryError: too large\nexit", "torch.cuda.OutOfMemoryError: too large"),
        ("step 1\nKilled\n\n", "Killed"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure(log, expected):
    assert reason_in(log) == expected


def test_one_line_asks_for_tencache():
    stock = json.loads((HERE / "zero3_offload.json").read_text())
    ours = config_for("tencache", stock)
    assert ours["zero_optimization"].pop("offload_engine") == "tencache"
    assert ours == config_for("stock", stock) == stock


def test_every_framework_says_what_it_needs():
    for name in names():
        assert any(
            line.startswith("deepspeed==") for line in (HERE / name / "requirements.txt").read_text().splitlines()
        )
    assert {"axolotl", "llamafactory", "ms-swift", "transformers", "trl"} <= set(names())


def test_an_unknown_framework_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["trls", "--work", "nowhere"])
    assert "no such framework: trls; there are axolotl, llamafactory" in capsys.readouterr().err
