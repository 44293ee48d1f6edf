# SPDX-License-Identifier: Apache-2.0
"""``tencache tune``: short real runs on a temporary folder, and its advice from given rates."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tencache_ds.cli import main, tune, tune_measure, tune_result
from tencache_ds.cli.tune_measure import stock_grid, tencache_grid
from tencache_ds.cli.tune_result import LEAST_ROUNDS, Choice, Measured, PathResult, cache_folder, endurance
from tencache_ds.config import options_from
from tencache_ds.errors import ConfigError, StorageError
from tencache_ds.integration.config_checks import read_aio_section
from tencache_ds.io import BACKENDS
from tencache_ds.planning.cores import LANES
from tencache_ds.profiling import filesystem, probe

pytestmark = pytest.mark.timeout(300)  # DeepSpeed may compile its operators

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    # Not by XDG_CACHE_HOME: torch keeps compiled operators there, too.
    monkeypatch.setattr(tune_result, "cache_folder", lambda: folder / "tencache")
    return folder


def measured(mixed: float = 1.0, rounds: tuple[float, ...] = (), **settings: bool | int) -> Measured:
    return Measured(settings=settings, mixed_bytes_per_s=mixed, rounds=rounds)


def result(path: Path, **changes: Any) -> PathResult:
    settings = tencache_grid("native")[0]
    values: dict[str, Any] = {
        "path": str(path),
        "measured_at": datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc),
        "seconds": 10.0,
        "filesystem": "ext4",
        "device": "Fast 1",
        "disks_nbytes": 10**12,
        "logical_block_nbytes": 512,
        "physical_block_nbytes": 4096,
        "direct": True,
        "request_nbytes": 8 * MIB,
        "in_flight": 16,
        "backend": "native",
        "backend_reason": "the native op loads",
        "tencache": Choice(tried=(measured(2e9, **settings),)),
        "stock": Choice(tried=tuple(measured(1e9, **one) for one in stock_grid(4))),
    }
    return PathResult(**(values | changes))


class TestRealRun:
    def test_everything_is_measured_printed_and_written(
        self, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        # capfd, not capsys: DeepSpeed's builders need a sys.stderr with a file descriptor.
        folder, file = tmp_path / "disk [1]", tmp_path / "out.json"
        folder.mkdir()
        command = ["tune", "--nvme-path", str(folder), "--seconds", "1", "--json", str(file)]
        assert main([*command, "--drive-bytes", "1e12", "--parameters", "1e9", "--step-seconds", "10"]) == 0
        output = capfd.readouterr().out
        assert str(folder) in output
        assert list(folder.iterdir()) == []
        assert list(cache.iterdir()) == []
        content = json.loads(file.read_text())
        (result,) = content["paths"]
        assert result["backend"] in BACKENDS
        default = result["tencache"]["tried"][0]
        assert default["settings"] == tencache_grid(result["backend"])[0]
        rates = [default[f"{kind}_bytes_per_s"] for kind in ("read", "write", "mixed")]
        assert min(rates) > 0
        assert all(f"{rate / 1e9:.2f}" in output for rate in rates)
        section = result["stock_config"]
        if section is None:
            assert "stock was not measured" in output
        else:
            # What is printed is JSON once it is between the braces of a config, and DeepSpeed takes it as it is.
            printed = output[output.index("Stock DeepSpeed") :].split("\n", 1)[1].split("Endurance")[0]
            assert json.loads("{" + printed + "}") == section
            parsed = read_aio_section(section)
            assert parsed | section["aio"] == parsed
            assert type(parsed["single_submit"]) is type(parsed["overlap_events"]) is bool
            assert parsed["intra_op_parallelism"] >= 1
        settings = result["tencache_config"]
        assert options_from(settings["tencache"]).io_lanes >= 1
        assert read_aio_section(settings)["block_size"] % 4096 == 0
        assert [one["drive_writes_per_day"] for one in content["endurance"]] == pytest.approx(
            [per_parameter * 1e9 * 8640 / 1e12 for per_parameter in (12, 14, 18)]
        )

    def test_without_direct_io_it_warns_and_leaves_stock_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real_open = os.open

        def without_direct(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real_open(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", without_direct)
        result = tune_measure.measure_path(tmp_path, 0.5)
        assert not result.direct
        assert any("refuses O_DIRECT" in line and str(tmp_path) in line for line in result.warnings)
        assert result.stock is None
        assert result.stock_section() is None
        assert any("needs O_DIRECT" in note for note in result.notes)
        assert list(tmp_path.iterdir()) == []

    def test_memory_and_networks_are_warned_of(self, tmp_path: Path) -> None:
        for kind, fragment in (("tmpfs", "RAM, not a disk"), ("nfs4", "over a network"), ("ext4", "")):
            warnings = tune_measure.warnings_of(tmp_path, filesystem.FileSystem(kind, "/", "none"), True)
            assert len(warnings) == bool(fragment)
            assert all(fragment in line and str(tmp_path) in line for line in warnings)

    def test_the_slowest_case_still_has_a_figure_for_each_direction(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tune_measure, "file_system_of", lambda folder: filesystem.FileSystem("tmpfs", "/", "none"))
        monkeypatch.setattr(tune_measure, "block_device_of", lambda folder: None)
        result = tune_measure.measure_path(tmp_path, 0.01)
        assert result.tencache.default.read_bytes_per_s is not None
        assert result.tencache.best is result.tencache.default  # one round decides nothing
        assert "RAM, not a disk" in result.warnings[0]
        assert (result.device, result.logical_block_nbytes) == ("", None)

    def test_a_failing_device_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any, kind: Any, slot: int, turn: int) -> Any:
            raise StorageError("read", "/proc/self/fd/7", 4096, 8 * MIB, "Input/output error", errno=errno.EIO)

        monkeypatch.setattr(tune_measure.TenCacheSession, "start", fail)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            tune_measure.measure_path(tmp_path, 0.2)
        assert caught.value.path == str(tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestErrors:
    def test_paths_that_cannot_be_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        absent = tmp_path / "absent"
        assert main(["tune", "--nvme-path", str(tmp_path), str(absent)]) == 1
        assert f"{absent} is not a folder: create it" in capsys.readouterr().err
        monkeypatch.setattr(probe, "free_nbytes", lambda folder: MIB)
        assert main(["tune", "--nvme-path", str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert f"{tmp_path} has {MIB} bytes free" in error
        assert "free some space" in error
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
        assert main(["tune", "--nvme-path", str(tmp_path)]) == 1
        assert f"sudo chown $USER {tmp_path}" in capsys.readouterr().err

    def test_json_that_cannot_be_written_is_said_first(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "absent" / "out.json"
        assert main(["tune", "--nvme-path", str(tmp_path), "--json", str(file)]) == 1
        assert str(file) in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--seconds", "--parameters", "--step-seconds", "--drive-bytes"])
    def test_numbers_that_make_no_sense(self, tmp_path: Path, option: str) -> None:
        for value in ("0", "-1", "nan", "inf", "x"):
            with pytest.raises(SystemExit, match="2"):
                main(["tune", "--nvme-path", str(tmp_path), option, value])

    def test_a_device_with_large_blocks_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device = filesystem.BlockDevice(("Huge",), (), 0, 8192, 8192)
        monkeypatch.setattr(tune_measure, "block_device_of", lambda folder: device)
        with pytest.raises(ConfigError, match="logical blocks of 8192 bytes"):
            tune_measure.measure_path(tmp_path, 1.0)


class TestAdvice:
    def test_the_default_stays_without_a_clear_winner(self) -> None:
        default = measured(rounds=(1.0,) * LEAST_ROUNDS, io_lanes=8)
        others = (
            measured(rounds=(1.04,) * LEAST_ROUNDS, io_lanes=4),  # too little
            measured(rounds=(*(2.0,) * (LEAST_ROUNDS - 1), 0.9), io_lanes=2),  # not in every round
            measured(rounds=(2.0,) * (LEAST_ROUNDS - 1), io_lanes=16),  # too few rounds
            measured(mixed=9.0, io_lanes=32),  # not in the finals
        )
        choice = Choice(tried=(default, *others))
        assert choice.best is choice.default
        assert choice.gain == 0

    def test_of_equals_the_one_closest_to_the_default_wins(self) -> None:
        default = measured(rounds=(1.0,) * LEAST_ROUNDS, io_lanes=8, queue_depth=8)
        closest = measured(rounds=(1.5,) * LEAST_ROUNDS, io_lanes=8, queue_depth=32)
        far = measured(rounds=(1.55,) * LEAST_ROUNDS, io_lanes=2, queue_depth=32)
        much_faster = measured(rounds=(2.0,) * LEAST_ROUNDS, io_lanes=2, queue_depth=32)
        assert Choice(tried=(default, far, closest)).best == closest
        assert Choice(tried=(default, closest, far)).gain == pytest.approx(0.5)
        assert Choice(tried=(default, closest, much_faster)).best == much_faster

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_grids_begin_with_the_defaults_and_can_be_set(self, backend: str) -> None:
        grid = tencache_grid(backend)
        defaults = options_from(None)
        assert (grid[0]["io_lanes"], grid[0]["io_request_size"]) == (LANES, defaults.io_request_size)
        assert all(grid.count(one) == 1 for one in grid)
        for settings in grid:
            options_from({name: settings[name] for name in ("io_lanes", "io_request_size")})
        assert read_aio_section({}) | stock_grid(2)[0] == read_aio_section({})
        assert len(stock_grid(16)) == len(stock_grid(2)) + 1

    def test_endurance(self) -> None:
        in_ram, on_nvme, stock = endurance(7e9, 30.0, 3.84e12)
        assert (in_ram.bytes_per_parameter, on_nvme.bytes_per_parameter, stock.bytes_per_parameter) == (12, 14, 18)
        assert in_ram.nbytes_per_step == 84e9
        assert in_ram.nbytes_per_day == 84e9 * 2880
        assert in_ram.drive_writes_per_day == pytest.approx(63.0)
        assert endurance(7e9, 30.0, None)[0].drive_writes_per_day is None

    def test_drives_count_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drive = filesystem.BlockDevice(("Fast 1",), ("S1",), 100, 512, 512)
        other = filesystem.BlockDevice(("Fast 1",), ("S2",), 100, 512, 512)
        devices = {"a": drive, "b": drive, "c": other, "ram": None}
        monkeypatch.setattr(tune, "block_device_of", lambda path: devices[str(path)])
        assert tune._drives_nbytes([Path("a"), Path("b"), Path("c")]) == 200
        assert tune._drives_nbytes([Path("a"), Path("ram")]) is None


class TestCache:
    def test_saved_only_when_asked_and_shown_until_fresh(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        measurements = []

        def measure(folder: Path, seconds: float, advance: Any) -> PathResult:
            measurements.append(folder)
            return result(folder, seconds=seconds)

        monkeypatch.setattr(tune_measure, "measure_path", measure)
        command = ["tune", "--nvme-path", str(tmp_path)]
        assert main(command) == 0
        assert list(cache.iterdir()) == []
        assert main([*command, "--save"]) == 0
        (file,) = (cache / "tencache").iterdir()
        assert str(file) in capsys.readouterr().out
        assert main(command) == 0
        assert len(measurements) == 2
        assert "Measured on 2026-01-02 03:04 UTC" in capsys.readouterr().out
        assert main([*command, "--fresh"]) == 0
        assert main([*command, "--seconds", "5"]) == 0
        assert len(measurements) == 4
        file.write_text("{")
        assert main(command) == 0
        assert len(measurements) == 5

    def test_a_result_belongs_to_a_device_and_to_versions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tune_result.save(tmp_path, result(tmp_path))
        assert tune_result.load(tmp_path, 10.0) == result(tmp_path)
        assert oct(file.parent.stat().st_mode & 0o022) == "0o0"
        (tmp_path / "below").mkdir()
        assert tune_result.cache_file(tmp_path / "below", 10.0) == file
        for target, name, value in (
            (tune_result, "__version__", "99"),
            (tune_result, "file_system_of", lambda folder: filesystem.FileSystem("xfs", "/", "/dev/other")),
            (
                tune_result,
                "block_device_of",
                lambda folder: filesystem.BlockDevice(("Fast 1",), ("other serial",), 0, 512, 512),
            ),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(target, name, value)
                assert tune_result.load(tmp_path, 10.0) is None

    def test_where_it_is(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for given in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", given)
            assert cache_folder() == tmp_path / ".cache" / "tencache"


def test_the_command_line_starts_without_torch_or_deepspeed() -> None:
    code = "import sys, tencache_ds.cli.tune; print({'torch', 'deepspeed', 'pydantic'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"
