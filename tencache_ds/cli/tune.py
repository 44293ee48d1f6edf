# SPDX-License-Identifier: Apache-2.0
"""``tencache tune``: benchmarks each path, recommends settings, and estimates how much drive wear training causes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tencache_ds.cli.console import check_json_file, format_nbytes, open_console, positive
from tencache_ds.errors import TenCacheError
from tencache_ds.profiling.filesystem import block_device_of

if TYPE_CHECKING:  # both need torch and DeepSpeed, which `tencache doctor` does without
    from tencache_ds.cli.tune_result import Choice, Endurance, PathResult


def add_command(commands: Any) -> None:
    """Registers ``tune`` with what :meth:`argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="measure storage and recommend settings for TenCache and for stock DeepSpeed",
        description="Measures each folder's storage with TenCache's and with DeepSpeed's I/O, and recommends settings "
        "for both. Its files are removed automatically. Exit status 1 if a folder cannot be measured.",
    )
    parser.add_argument(
        "--nvme-path",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="FOLDER",
        help="folders to measure, one after another",
    )
    parser.add_argument("--seconds", type=positive, default=10.0, help="time per folder (default: %(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measurements to this file")
    parser.add_argument(
        "--save", action="store_true", help="save the result in the user's cache folder and show it next time"
    )
    parser.add_argument("--fresh", action="store_true", help="ignore a saved result and measure again")
    wear = parser.add_argument_group("endurance")
    wear.add_argument(
        "--parameters", type=positive, default=7e9, help="number of parameters of the model (default: %(default)g)"
    )
    wear.add_argument(
        "--step-seconds", type=positive, default=30.0, help="seconds per optimizer step (default: %(default)g)"
    )
    wear.add_argument(
        "--drive-bytes", type=positive, help="size of all drives together (default: as reported by the kernel)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and, where asked, writes; returns 1 if a folder cannot be measured, else 0."""
    console = open_console()
    try:
        _tune(arguments, console)
    except (TenCacheError, OSError) as error:
        print(f"tencache tune: {error}", file=sys.stderr)
        return 1
    return 0


def _tune(arguments: argparse.Namespace, console: Console) -> None:
    from tencache_ds.profiling.probe import check_folder

    # Errors in the arguments are reported before anything is imported or measured.
    check_json_file(arguments.json)
    for folder in arguments.nvme_path:
        check_folder(folder.expanduser())

    from tencache_ds.cli.tune_result import endurance

    results = []
    for folder in arguments.nvme_path:
        result, saved = _result_for(folder.expanduser(), arguments)
        results.append(result)
        show(result, console)
        if saved:
            console.print(saved, markup=False, highlight=False, soft_wrap=True)
    wear = endurance(
        arguments.parameters, arguments.step_seconds, arguments.drive_bytes or _drives_nbytes(arguments.nvme_path)
    )
    show_endurance(wear, arguments.parameters, arguments.step_seconds, console)
    if arguments.json is not None:
        content = {"paths": [result.as_json() for result in results], "endurance": [one.model_dump() for one in wear]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def _result_for(folder: Path, arguments: argparse.Namespace) -> tuple[PathResult, str]:
    """The saved or a new result, and a message about saving."""
    from tencache_ds.cli import tune_result
    from tencache_ds.cli.tune_measure import measure_path

    if not arguments.fresh:
        known = tune_result.load(folder, arguments.seconds)
        if known is not None:
            date = known.measured_at.strftime("%Y-%m-%d %H:%M UTC")
            return known, f"Measured on {date} in {known.path}, on the same device; --fresh measures again."
    with _progress(str(folder)) as advance:
        result = measure_path(folder, arguments.seconds, advance)
    if not arguments.save:
        return result, ""
    return result, f"Saved in {tune_result.save(folder, result)}"


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on standard error if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"measuring {name}", total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _drives_nbytes(folders: list[Path]) -> float | None:
    """Size of the drives under all folders, each counted once; None if one of them is on no drive."""
    devices = {block_device_of(folder.expanduser()) for folder in folders}
    sizes = [device.disks_nbytes for device in devices if device is not None]
    return sum(sizes) if None not in devices and all(sizes) else None


def show(result: PathResult, console: Console) -> None:
    """Prints the results for one path."""

    # Not as markup: a path may have brackets. Soft: lines to copy must not be broken.
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    console.rule(escape(result.path), align="left")
    device = f" on {result.device}, {format_nbytes(result.disks_nbytes)}" if result.device else ""
    blocks = ""
    if result.logical_block_nbytes is not None:
        blocks = f", blocks of {result.logical_block_nbytes} bytes ({result.physical_block_nbytes} physically)"
    say(f"{result.filesystem}{device}{blocks}, O_DIRECT {'works' if result.direct else 'is refused'}")
    say(f"TenCache's backend: {result.backend} ({result.backend_reason})")
    for warning in result.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)
    console.print(_rates(result))
    for note in result.notes:
        say(note)
    best = result.tencache
    if best.best is best.default:
        say("TenCache: no setting tried was better than the defaults. There is nothing to set.")
    else:
        say(f"TenCache: {100 * best.gain:.0f} % faster than with the defaults (and in every round) with")
        say(_config(result.tencache_sections()))
    if result.stock is not None:
        gain = "no setting tried was better than its defaults"
        if result.stock.best is not result.stock.default:
            gain = f"{100 * result.stock.gain:.0f} % faster than its defaults"
        say(f"Stock DeepSpeed (without TenCache): {gain}")
        say(_config(result.stock_section()))


def _config(sections: object) -> str:
    """Members for ``ds_config.json``, to be pasted between its braces."""
    return "\n".join(line for line in json.dumps(sections, indent=2).splitlines()[1:-1])


def _rates(result: PathResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("GB/s")
    for name in ("read", "write", "mixed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for side, choice in (("TenCache", result.tencache), ("stock", result.stock)):
        if choice is not None:
            _add_rows(table, side, choice)
    return table


def _add_rows(table: Table, side: str, choice: Choice) -> None:
    for one in choice.tried:
        rates = (one.read_bytes_per_s, one.write_bytes_per_s, one.mixed_bytes_per_s)
        marks = [mark for mark, is_it in (("default", one is choice.default), ("best", one is choice.best)) if is_it]
        table.add_row(
            f"{side} {_knobs(one.settings)}",
            *("" if rate is None else f"{rate / 1e9:.2f}" for rate in rates),
            ", ".join(marks),
        )


def _knobs(settings: dict[str, bool | int]) -> str:
    """Settings in the width of a table's column."""
    lanes = settings.get("io_lanes", settings.get("intra_op_parallelism"))
    parts = [f"{lanes} lanes" if "io_lanes" in settings else f"{lanes} threads"]
    size = min(settings["block_size"], settings.get("io_request_size", settings["block_size"]))
    parts += [f"x {settings['queue_depth']}", f"x {format_nbytes(size)}"]
    parts += ["single_submit"] if settings.get("single_submit") else []
    parts += ["no overlap"] if settings.get("overlap_events") is False else []
    return " ".join(parts)


def show_endurance(wear: list[Endurance], parameters: float, step_s: float, console: Console) -> None:
    """Prints the drive wear that training causes."""
    console.rule("Endurance", align="left")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"{parameters / 1e9:g} billion parameters, {step_s:g} s per step")
    for name in ("bytes/parameter", "GB/step", "TB/day", "drive writes/day"):
        table.add_column(name, justify="right")
    for one in wear:
        table.add_row(
            one.name,
            str(one.bytes_per_parameter),
            f"{one.nbytes_per_step / 1e9:.1f}",
            f"{one.nbytes_per_day / 1e12:.1f}",
            "size unknown" if one.drive_writes_per_day is None else f"{one.drive_writes_per_day:.1f}",
        )
    console.print(table)
    console.print(
        "Drives are rated for 0.3 to 3 drive writes a day over five years. State that TenCache keeps in RAM or on the "
        "GPU is not written to the drives.",
        highlight=False,
        soft_wrap=True,
    )
