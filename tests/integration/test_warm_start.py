# SPDX-License-Identifier: Apache-2.0
"""A program that is forked from the warm parent finds what it would find if it had been started."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import warm_parent

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA every program is started"),
]

LOOK = """
import json, os, random, signal, sys, threading
import numpy, torch, deepspeed, torch._inductor.lowering
names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
links = [os.readlink(name) for name in names if os.path.lexists(name)]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[:3], "folder": os.getcwd(),
    "environment": {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")},
    "main": sys.modules["__main__"].__dict__ is globals(), "threads": len(os.listdir("/proc/self/task")),
    "pipes": [link for link in links if "pipe:" in link or "pidfd" in link],
    "leads": os.getsid(0) == os.getpid(),
    "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "distributed": torch.distributed.is_initialized(),
    "tencache": sorted(name for name in sys.modules if name.startswith("tencache_ds.integration")),
    "threads of torch": torch.get_num_threads(),
}))
print(json.dumps({"random": [random.random(), numpy.random.rand(), torch.rand(1).item()]}))
"""


OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@pytest.fixture(scope="module")
def look(harness: Any) -> Path:
    path: Path = harness.folder() / "look.py"
    path.write_text(LOOK)
    return path


def seen(finished: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in finished.succeeded().log.splitlines() if line.startswith("{")]


def test_nothing_tells_a_fork_from_a_start(harness: Any, look: Path) -> None:
    folder = harness.folder()
    words = [str(look), "--some", "words"]
    (forked, chance), (again, other) = (seen(harness.python(words, folder=folder)) for _ in range(2))
    started, _ = seen(harness.execute([sys.executable, *words], folder=folder))
    assert forked == again == started
    assert chance != other


def test_ranks_have_the_variables_that_the_launcher_sets(harness: Any) -> None:
    told = f"{{key: os.environ[key] for key in {OF_A_RANK}}} | {{'words': sys.argv[1:]}}"
    # Each rank has its own file: the launcher starts Python unbuffered, and ranks that print at once share lines.
    program = f"import json, os, sys\njson.dump({told}, open('rank_' + os.environ['RANK'] + '.json', 'w'))\n"

    def ranks_of(start: Callable[[list[str], Path], Any]) -> list[dict[str, Any]]:
        folder = harness.folder()
        (folder / "program.py").write_text(program)
        start([str(folder / "program.py"), "word"], folder).succeeded()
        return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]

    forked = ranks_of(lambda words, folder: harness.python(words, folder=folder, ranks=2))
    launched = ranks_of(lambda words, folder: harness.launch(2, words, folder=folder))
    assert forked == launched
    assert len(forked) == 2


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise RuntimeError('made up')", 1),
        ("sys.exit(7)", 7),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_how_it_ends(harness: Any, line: str, code: int) -> None:
    folder = harness.folder()
    (folder / "program.py").write_text(f"import atexit, os, signal, sys\natexit.register(print, 'the end')\n{line}\n")
    finished = harness.python([str(folder / "program.py")], folder=folder)
    assert finished.code == code
    assert ("the end" in finished.log) == (code in (1, 7))
    assert ("RuntimeError: made up" in finished.log) == (code == 1)


def test_a_rank_that_fails_ends_the_other(harness: Any) -> None:
    folder = harness.folder()
    program = "import os, sys, time\nsys.exit(9) if os.environ['RANK'] == '1' else time.sleep(100)\n"
    (folder / "program.py").write_text(program)
    finished = harness.python([str(folder / "program.py")], folder=folder, ranks=2, timeout_s=60)
    assert finished.code == 9


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_hangs_says_where_and_takes_its_children_along(harness: Any, ranks: int) -> None:
    folder = harness.folder()
    program = "import os, time\nopen(f'pid{os.getpid()}', 'w').close()\ndef hangs():\n    time.sleep(100)\nhangs()\n"
    (folder / "program.py").write_text(program)
    finished = harness.python([str(folder / "program.py")], folder=folder, ranks=ranks, timeout_s=2)
    assert finished.code is None
    assert finished.log.count("in hangs") == ranks
    pids = [int(path.name.removeprefix("pid")) for path in folder.glob("pid*")]
    assert len(pids) == ranks
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_other_variables_need_a_start_of_their_own(harness: Any, look: Path) -> None:
    usual = harness.environment(1)
    harness.python([str(look)])
    parent = harness._parent
    assert parent.fits(usual)
    assert parent.fits(usual | {"MASTER_PORT": "1", "RANK": "1"})
    assert not parent.fits(usual | {"TENCACHE_ENABLE": "1"})
    assert not parent.fits({key: value for key, value in usual.items() if key != "OMP_NUM_THREADS"})


def test_there_is_no_fork_beside_another_thread() -> None:
    """It might hold a lock, as of malloc or of an import, which nobody would ever release in the child."""
    parent = warm_parent.WarmParent(*os.pipe())
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"\d+ threads: one of them may hold a lock"):
            parent._fork()
    finally:
        over.set()
        thread.join()
