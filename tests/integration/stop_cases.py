# SPDX-License-Identifier: Apache-2.0
"""Training that is told to stop: one process imports everything and forks a trainer for each case.

A case names a signal, when the trainer gets it, and what the user's script has made of that signal. Reported is how the
trainer ended, what it left in its folder and which processes still had a file there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.shared_buffers import remove_shared_buffers

PATIENCE_S = 60.0
STEPS_BEFORE, STEPS_AFTER = 2, 2


def holders(folder: Path, name: str = "") -> list[int]:
    """Processes that have a file below the folder open whose name, now or once, has ``name`` in it."""
    pids = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        links = []
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile: one file, not the process
                    links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        if any(link.startswith(f"{folder.resolve()}/") and name in link for link in links):
            pids.add(int(pid))
    return sorted(pids)


def left_in(folder: Path) -> dict[str, int]:
    """Files and their bytes of storage; folders that are empty end in a slash."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sizes[str(path.relative_to(folder))] = path.stat().st_blocks * 512
        elif not any(path.iterdir()):
            sizes[f"{path.relative_to(folder)}/"] = 0
    return sizes


# The trainer


def prepare(case: dict[str, Any], when: str, tell: int) -> None:
    """What the user's script does with the signal, before or after DeepSpeed is initialized."""
    if case.get("handler") == when:
        signal.signal(case["signal"], lambda *_: os.write(tell, b"handler\n"))
    elif case.get("ignored") == when:
        signal.signal(case["signal"], signal.SIG_IGN)


def be_a_worker(running: Any) -> None:
    running.wait(PATIENCE_S)
    time.sleep(10)


def be_a_trainer(case: dict[str, Any], engine_name: str, folder: Path, tell: int, go_on: int) -> None:
    """In the forked process; ``tell`` gets a line for whatever has happened."""
    import training

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # which nohup, for one, has children ignore
        signal.signal(number, signal.SIG_DFL)
    prepare(case, "before", tell)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    engine = training.build({"model": "mlp", **case}, engine_name, str(folder))
    if handlers != {number: signal.getsignal(number) for number in signal.valid_signals()}:
        raise RuntimeError("DeepSpeed's initialization has changed the signals' handlers")
    prepare(case, "after", tell)
    generator = torch.Generator().manual_seed(1000)
    training.train(engine, STEPS_BEFORE, generator, oracle=False)
    if case.get("workers"):
        # As a data loader makes them, but that its own SIGCHLD handler ends the script when one of them dies.
        context = multiprocessing.get_context("fork")
        running = context.Barrier(3)  # all handlers of the fork have run in a process that has come to its function
        workers = [context.Process(target=be_a_worker, args=[running]) for _ in range(2)]
        for worker in workers:
            worker.start()
        running.wait(PATIENCE_S)
        os.write(tell, f"workers {' '.join(str(worker.pid) for worker in workers)}\n".encode())
    os.write(tell, b"steps\n")
    if case.get("in_native_code"):
        ctypes.PyDLL(None).sleep(int(PATIENCE_S))  # with the GIL, as a collective in C++ may: no Python handler runs
    while not select.select([go_on], [], [], 0)[0]:
        training.train(engine, 1, generator, oracle=False)
    training.train(engine, STEPS_AFTER, generator, oracle=False)
    os.write(tell, b"more steps\n")
    engine.destroy()


def be_a_saver(case: dict[str, Any], engine_name: str, folder: Path, tell: int) -> None:
    """In the forked process: goes on from the last checkpoint, and saves one after each step."""
    import training

    engine = training.build({"model": "mlp", **case}, engine_name, str(folder / "nvme"))
    checkpoints = folder / "checkpoints"
    if (checkpoints / "latest").exists():
        engine.load_checkpoint(str(checkpoints))
    while engine.global_steps < case["last_step"]:
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        loss = training.train(engine, 1, generator, oracle=False)
        os.write(tell, f"step {engine.global_steps} {loss}\n".encode())
        engine.save_checkpoint(str(checkpoints))
    engine.destroy()


def run_kills(case: dict[str, Any], engine_name: str, folder: Path, log: Path) -> dict[str, Any]:
    """Kills one trainer after another at random moments; the last one trains to the end."""
    (folder / "nvme").mkdir(parents=True)
    moments = random.Random(case["seed"])
    runs: list[dict[str, Any]] = []
    for last in (*(False,) * case["kills"], True):
        latest = folder / "checkpoints" / "latest"
        run: dict[str, Any] = {"latest": latest.read_text() if latest.exists() else "", "losses": {}}
        last_step = max((int(step) for former in runs for step in former["losses"]), default=0) + 3 if last else 10**6
        pid, told, go_on = start(case | {"last_step": last_step}, engine_name, folder, log)
        t_kill = None
        try:
            while line := told.readline().decode():
                _, step, loss = line.split(maxsplit=2)
                run["losses"][step] = loss.strip()
                if t_kill is None and not last:
                    t_kill = time.monotonic() + moments.uniform(0, case["longest_s"])
                if t_kill is not None and not select.select([told], [], [], max(t_kill - time.monotonic(), 0))[0]:
                    os.kill(pid, signal.SIGKILL)
                    t_kill = None
        finally:
            told.close()
            os.close(go_on)
            run["status"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            remove_shared_buffers(os.environ["MASTER_PORT"])
        runs.append(run)
    return {"runs": runs, "latest": latest.read_text(), "partial": len(list(folder.rglob("*.partial")))}


def start(case: dict[str, Any], engine_name: str, folder: Path, log: Path) -> tuple[int, Any, int]:
    """Forks a trainer; its number, what it tells, and where it is told to come to its end."""
    told, tell = os.pipe()
    wait, go_on = os.pipe()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            import deepspeed

            deepspeed.init_distributed()
            if "kills" in case:
                be_a_saver(case, engine_name, folder, tell)
            else:
                be_a_trainer(case, engine_name, folder, tell, wait)
            code = 0
        except KeyboardInterrupt:
            print("KeyboardInterrupt reached the script", flush=True)
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(tell)
    os.close(wait)
    return pid, os.fdopen(told, "rb", buffering=0), go_on


# The one who stops it


def wait_for(told: Any, what: str) -> str:
    """The rest of the line that begins so."""
    t_end = time.monotonic() + PATIENCE_S
    while time.monotonic() < t_end:
        if select.select([told], [], [], 1.0)[0]:
            line = told.readline().decode()
            if line.startswith(what):
                return line[len(what) :].strip()
            if not line:
                raise RuntimeError(f"the trainer has ended before it said {what!r}")
    raise TimeoutError(f"the trainer has not said {what!r}")


def wait_for_scratch(folder: Path, pid: int) -> None:
    t_end = time.monotonic() + PATIENCE_S
    while pid not in holders(folder):
        if time.monotonic() > t_end:
            raise TimeoutError("the trainer makes no scratch files")


def run(case: dict[str, Any], engine_name: str, folder: Path, log: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    pid, told, go_on = start(case, engine_name, folder, log)
    ended = False
    result: dict[str, Any] = {}
    try:
        if case.get("while") == "initializing":
            wait_for_scratch(folder, pid)
        else:
            workers = [int(worker) for worker in wait_for(told, "workers").split()] if case.get("workers") else []
            wait_for(told, "steps")
            result["trainer"], result["holders_while_training"] = pid, holders(folder)
            if workers:
                os.kill(workers[0], signal.SIGTERM)
                os.write(go_on, b"x")
                wait_for(told, "more steps")
        os.kill(pid, case["signal"])
        if case.get("handler"):
            wait_for(told, "handler")
        if case.get("handler") or case.get("ignored"):
            os.write(go_on, b"x")
            wait_for(told, "more steps")
        t_start = time.monotonic()
        while not ended and time.monotonic() < t_start + PATIENCE_S:
            waited, status = os.waitpid(pid, os.WNOHANG)
            ended = waited == pid
            time.sleep(0 if ended else 0.01)
        if not ended:
            raise TimeoutError("the trainer does not end")
        result["seconds"] = time.monotonic() - t_start
        result["code"] = os.waitstatus_to_exitcode(status)
        result["holders"] = holders(folder)
        result["left"] = left_in(folder)
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told.close()
        os.close(go_on)
        remove_shared_buffers(os.environ["MASTER_PORT"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True, help="JSON file: list of [name, case, engine]")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--oracle", help="not used: there are no cases with stock")
    arguments = parser.parse_args()
    import cpuinfo
    import deepspeed  # noqa: F401
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from tencache_ds.ops.async_io import load_pin_memory
    from tencache_ds.ops.tencache_aio import load_tencache_aio
    from tencache_ds.ops.tencache_update import load_tencache_update

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    CPUAdamBuilder().load(verbose=False)
    for load in (load_tencache_aio, load_tencache_update, load_pin_memory):
        load()  # a process that is killed while it loads an op leaves a lock at which all later ones wait
    import torch._inductor.lowering  # noqa: F401  (DeepSpeed's choice of optimizer brings it in)

    results: dict[str, Any] = {}
    base = Path(arguments.folder)
    for name, case, engine in json.loads(Path(arguments.cases).read_text()):
        key, log = f"{name}/{engine}", base / f"{name}-{engine}.log"
        t_start = time.monotonic()
        try:
            run_one = run_kills if "kills" in case else run
            results[key] = run_one(case, engine, base / f"{name}-{engine}", log)
        except Exception as error:  # reported to the test, which fails with it
            results[key] = {"error": str(error), "traceback": traceback.format_exc() + log.read_text()[-3000:]}
        else:
            results[key]["log"] = log.read_text()[-3000:]
        print(f"{key}: {results[key].get('error', 'done')} ({time.monotonic() - t_start:.1f} s)", flush=True)
        (base / "results_0.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
