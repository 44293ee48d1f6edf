# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's CPU Adam gets the processor's vendor without py-cpuinfo, and whatever else it may ask for from there;
DeepSpeed's Muon, which is imported for every optimizer, compiles nothing then."""

from __future__ import annotations

import subprocess
import sys

import cpuinfo
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.host_path.startup import ProcessorInfo, vendor_at_once
from tencache_ds.integration.chunk_update import loaded_when_needed
from tencache_ds.profiling.host import processor_field

pytestmark = pytest.mark.timeout(120)


def test_the_vendor_is_known_without_py_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cpuinfo.get_cpu_info()
    asked = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: asked.append(True) or known)
    with loaded_when_needed(), vendor_at_once():
        optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(4))])
        assert optimizer.cpu_vendor == known.get("vendor_id_raw", "unknown").lower()
        assert asked == ([] if "vendor_id_raw" in known else [True])
        info = cpuinfo.get_cpu_info()  # what builds an op asks for more
        assert all(info[key] == value for key, value in known.items())
    assert cpuinfo.get_cpu_info() is known


def test_all_else_about_the_processor_is_found_once() -> None:
    answers = iter([{"vendor_id_raw": "GenuineIntel", "arch": "X86_64"}])
    info = ProcessorInfo("GenuineIntel", lambda: next(answers))
    assert "vendor_id_raw" in info
    assert info["arch"] == "X86_64"
    with pytest.raises(KeyError, match="no such"):
        info["no such"]


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n", "AuthenticAMD"),
        ("processor\t: 0\nvendor_id\t:\nCPU implementer\t: 0x41\n", None),
        ("processor\t: 0\nBogoMIPS\t: 243.75\n", None),
    ],
)
def test_the_vendor_that_linux_names(text: str, vendor: str | None) -> None:
    assert processor_field("vendor_id", cpuinfo=text) == vendor


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
