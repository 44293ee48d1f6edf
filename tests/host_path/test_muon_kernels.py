# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Muon, which is imported for every optimizer."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from deepspeed.runtime import compiler
from tencache_ds.host_path.startup import MODULE, compile_when_called

before = compiler.compile
compile_when_called()
assert compiler.compile is before
assert MODULE in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was loaded"

from deepspeed.runtime.zero.muon import original_muon

kernel = original_muon.zeropower_via_newtonschulz5
assert kernel.__name__ == "zeropower_via_newtonschulz5"
torch.compiler.set_stance("force_eager")
gradient = torch.randn(8, 4)
same = kernel(gradient, steps=5)
assert "torch._dynamo" in sys.modules
assert torch.equal(same, kernel(gradient, steps=5))
assert torch.equal(same, kernel.__wrapped__(gradient, steps=5))
compile_when_called()
"""


@pytest.mark.timeout(200)
def test_the_compiler_is_not_loaded_for_kernels_that_nobody_calls() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
