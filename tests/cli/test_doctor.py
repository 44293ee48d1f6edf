# SPDX-License-Identifier: Apache-2.0
"""``tencache doctor``: every finding from made-up surroundings, and the command on this machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tencache_ds import __version__
from tencache_ds.cli import doctor, main
from tencache_ds.cli.console import Finding, Level, format_nbytes

REQUIREMENTS = ["deepspeed<0.20,>=0.19.8", "torch>=2.5", 'pytest; extra == "test"']


def versions(**installed: str):
    def version_of(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    return version_of


WITH_AUTOLOAD = versions(torch="2.5.1")


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


class TestVersions:
    def test_supported_versions_are_ok(self) -> None:
        findings = by_subject(
            doctor.check_versions(versions(torch="2.13.0+cpu", deepspeed="0.19.9"), lambda _: REQUIREMENTS)
        )
        assert {finding.level for finding in findings.values()} == {Level.OK}
        assert findings["torch"].text == "2.13.0+cpu (supported: >=2.5)"

    @pytest.mark.parametrize("version", ["0.19.7", "0.20.0"])
    def test_deepspeed_outside_the_range_is_a_problem(self, version: str) -> None:
        findings = by_subject(doctor.check_versions(versions(torch="2.6", deepspeed=version), lambda _: REQUIREMENTS))
        assert findings["deepspeed"].level is Level.PROBLEM
        assert version in findings["deepspeed"].text
        assert "pip install 'deepspeed" in findings["deepspeed"].remedy

    def test_absent_torch_is_a_problem(self) -> None:
        findings = by_subject(doctor.check_versions(versions(deepspeed="0.19.8"), lambda _: REQUIREMENTS))
        assert (findings["torch"].level, findings["torch"].text) == (Level.PROBLEM, "not installed")

    def test_use_without_installation_is_a_warning(self) -> None:
        def not_installed(name: str) -> list[str]:
            raise metadata.PackageNotFoundError(name)

        findings = by_subject(doctor.check_versions(versions(torch="2.6", deepspeed="0.1"), not_installed))
        assert findings["tencache"].level is Level.WARNING
        assert findings["deepspeed"].level is Level.OK

    def test_declared_ranges_are_those_of_the_package(self) -> None:
        declared = metadata.requires("tencache-ds") or []
        assert any(line.startswith("deepspeed") and ">=0.16.4" in line for line in declared)


class TestEightBit:
    def test_without_bitsandbytes_nothing_is_said(self) -> None:
        assert doctor.check_eight_bit(versions()) == []

    @pytest.mark.parametrize(
        ("version", "level"), [("0.49.2", Level.WARNING), ("0.50.0", Level.OK), ("0.51.0.dev0", Level.OK)]
    )
    def test_a_version_without_kernels_for_cpus_is_a_warning(self, version: str, level: Level) -> None:
        (finding,) = doctor.check_eight_bit(versions(bitsandbytes=version))
        assert finding.level is level
        assert version in finding.text
        assert ("pip install 'bitsandbytes>=0.50'" in (finding.remedy or "")) == (level is Level.WARNING)


class TestActivation:
    def test_entry_point_is_installed(self) -> None:
        assert doctor.check_autoload({}, WITH_AUTOLOAD).level is Level.OK

    @pytest.mark.parametrize(
        ("torch", "level"),
        [("2.4.1+cu121", Level.WARNING), ("2.5.0a0+872d972e41.nv24.8", Level.OK), ("2.5.0", Level.OK)],
    )
    def test_a_torch_without_entry_points_names_the_other_ways(self, torch: str, level: Level) -> None:
        finding = doctor.check_autoload({}, versions(torch=torch))
        assert finding.level is level
        assert ("import tencache_ds" in (finding.remedy or "")) == (level is Level.WARNING)

    @pytest.mark.parametrize(
        ("environment", "level"),
        [
            ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, Level.WARNING),
            ({"TENCACHE_DISABLE": "1"}, Level.PROBLEM),
            ({"TENCACHE_DISABLE": "0"}, Level.OK),
            ({"TENCACHE_ENABLE": "1", "TENCACHE_DISABLE": "1"}, Level.PROBLEM),
        ],
    )
    def test_variables_that_switch_it_off(self, environment: dict[str, str], level: Level) -> None:
        assert doctor.check_autoload(environment, WITH_AUTOLOAD).level is level

    @pytest.mark.parametrize(("value", "said"), [("1", True), ("0", False)])
    def test_the_variable_that_switches_it_on_is_named(self, value: str, said: bool) -> None:
        finding = doctor.check_autoload({"TENCACHE_ENABLE": value}, WITH_AUTOLOAD)
        assert finding.level is Level.OK
        assert ("TENCACHE_ENABLE" in finding.text) == said

    def test_absent_entry_point_names_the_other_ways(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
        finding = doctor.check_autoload({}, WITH_AUTOLOAD)
        assert finding.level is Level.WARNING
        assert "tencache_ds.run" in finding.remedy


class TestBuildTools:
    def test_nothing_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        findings = by_subject(doctor.check_build_tools(lambda _: None, (tmp_path,)))
        assert {name: finding.level for name, finding in findings.items()} == {
            "compiler": Level.PROBLEM,
            "ninja": Level.PROBLEM,
            "python headers": Level.PROBLEM,
            "libaio": Level.WARNING,
        }
        assert all(finding.remedy for finding in findings.values())

    def test_everything_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for header in ("Python.h", "libaio.h"):
            (tmp_path / header).touch()
        monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        findings = doctor.check_build_tools(lambda name: f"/usr/bin/{name}", (tmp_path,))
        assert {finding.level for finding in findings} == {Level.OK}

    def test_ninja_beside_the_interpreter_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "ninja").touch()
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        assert by_subject(doctor.check_build_tools(lambda _: None))["ninja"].level is Level.OK


class TestHardware:
    @pytest.mark.parametrize(
        ("limit", "capabilities", "level"),
        [
            (resource.RLIM_INFINITY, 0, Level.OK),
            (8 << 20, 0, Level.WARNING),
            (8 << 20, 1 << 14, Level.OK),
            (64 << 30, 0, Level.OK),
        ],
    )
    def test_locked_memory(self, limit: int, capabilities: int, level: Level) -> None:
        finding = doctor.check_locked_memory(limit, f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
        assert finding.level is level
        assert bool(finding.remedy) is (level is not Level.OK)

    def test_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pynvml

        class Memory:
            total = 141 << 30

        for name, answer in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        }.items():
            monkeypatch.setattr(pynvml, name, answer)
        monkeypatch.setattr(metadata, "version", versions(torch="2.13.0+cpu"))
        gpu, mismatch = doctor.check_gpus()
        assert gpu.text == "NVIDIA H200, 141.0 GiB, driver 580.1"
        assert mismatch.level is Level.WARNING

    def test_no_driver_is_not_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pynvml

        def refuse() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", refuse)
        assert [finding.level for finding in doctor.check_gpus()] == [Level.OK]


class TestGpuDirectStorage:
    def find(self, folder: Path, driver: bool = True, udev: bool = True, **environment: str) -> str:
        if driver:
            (folder / "version").write_text("version: 2.24.2\n")
        if udev:
            (folder / "udev").mkdir()
        finding = doctor.check_gds(
            versions(**{"kvikio-cu13": "26.10.0"}), folder / "version", folder / "udev", environment
        )
        assert finding.level is Level.OK
        return finding.text

    def test_kvikio_is_missing(self, tmp_path: Path) -> None:
        finding = doctor.check_gds(versions(), tmp_path, tmp_path, {})
        assert finding.level is Level.OK, "it is optional"
        assert "not installed" in finding.text
        assert "pip install 'tencache-ds[gds-cu13]'" in finding.text

    def test_it_works(self, tmp_path: Path) -> None:
        assert self.find(tmp_path) == "kvikio-cu13 26.10.0, nvidia-fs driver 2.24.2"

    def test_compatibility_mode_says_why(self, tmp_path: Path) -> None:
        cases = {
            "the nvidia-fs driver is not loaded": {"driver": False},
            ":ro": {"udev": False},
            "KVIKIO_COMPAT_MODE": {"KVIKIO_COMPAT_MODE": "ON"},
        }
        for index, (reason, case) in enumerate(cases.items()):
            folder = tmp_path / str(index)
            folder.mkdir()
            text = self.find(folder, **case)
            assert "compatibility mode" in text
            assert reason in text


class TestStorage:
    def test_direct_io_refused_by_the_file_system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open = os.open

        def without_direct(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real_open(path, flags, mode)

        monkeypatch.setattr(os, "open", without_direct)
        findings = by_subject(doctor.check_nvme_path(tmp_path))
        assert findings["direct I/O"].level is Level.WARNING
        assert list(tmp_path.iterdir()) == []

    def test_a_file_is_a_problem(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.touch()
        assert [finding.level for finding in doctor.check_nvme_path(file)] == [Level.PROBLEM]

    def test_unwritable_folder_is_a_problem(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere, so permissions cannot show it
        (finding,) = doctor.check_nvme_path(tmp_path)
        assert finding.level is Level.PROBLEM
        assert str(tmp_path) in finding.remedy

    def test_little_space_is_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Usage:
            free = 14 * 10**9

        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage)
        finding = by_subject(doctor.check_nvme_path(tmp_path))["free space"]
        assert finding.level is Level.WARNING
        assert "1.0 billion parameters" in finding.text


class TestCommand:
    def test_exit_status_and_remedies(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        findings = [Finding(Level.OK, "a", "fine"), Finding(Level.WARNING, "b", "slow [x]", "do [this]")]
        monkeypatch.setattr(doctor, "examine", lambda _: findings)
        assert main(["doctor"]) == 0
        output = capsys.readouterr().out
        assert "slow [x]" in output
        assert "do [this]" in output
        findings.append(Finding(Level.PROBLEM, "c", "broken", "mend"))
        assert main(["doctor"]) == 1
        assert "1 problem(s), 1 warning(s)" in capsys.readouterr().out

    def test_this_machine(self, tmp_path: Path) -> None:
        findings = doctor.examine([tmp_path / "made-later", tmp_path])
        assert sum(finding.subject == "nvme path" for finding in findings) == 2
        assert all(bool(finding.remedy) is (finding.level is not Level.OK) for finding in findings)
        assert {"python", "torch", "deepspeed", "cpu", "memory", "nvme path", "free space"} <= by_subject(
            findings
        ).keys()

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["--version"])
        assert capsys.readouterr().out == f"tencache {__version__}\n"

    def test_unknown_command_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["cure"])
        assert "doctor" in capsys.readouterr().err

    def test_doctor_starts_without_torch_or_deepspeed(self) -> None:
        code = (
            "import sys\nfrom tencache_ds.cli import main\nmain(['doctor'])\n"
            "sys.exit(bool({'torch', 'deepspeed'} & sys.modules.keys()))"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
