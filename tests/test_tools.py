# SPDX-License-Identifier: Apache-2.0
"""The set-up script: what it decides to install, without installing it."""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What would have been run, in an environment that holds nothing yet."""
    ran: list[list[str]] = []
    monkeypatch.setattr(setup, "run", lambda what, *words: ran.append([str(word) for word in words]))
    monkeypatch.setattr(setup, "has", lambda python, requirement: False)
    monkeypatch.setattr(setup, "site_packages", lambda python: tmp_path)
    monkeypatch.delenv("TORCH_CPU_INDEX", raising=False)
    return ran


def install_torch(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], known: bool
) -> list[str]:
    monkeypatch.setattr(setup, "pip_knows", lambda python, requirement: known)
    setup.install(Path("python"), "serve", cuda=False)
    return next(command for command in commands if setup.TORCH_CPU in command)


def test_torch_comes_from_pip_where_it_has_one(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    assert "--extra-index-url" not in install_torch(setup, monkeypatch, commands, known=True)


@pytest.mark.parametrize("index", [None, "https://mirror.example/whl/cpu"])
def test_torch_comes_from_the_cpu_index_otherwise(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], index: str | None
) -> None:
    if index is not None:
        monkeypatch.setenv("TORCH_CPU_INDEX", index)
    command = install_torch(setup, monkeypatch, commands, known=False)
    assert command[command.index("--extra-index-url") + 1] == (index or setup.DEFAULT_TORCH_CPU_INDEX)


def test_what_breaks_on_a_cpu_is_removed(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "has", lambda python, requirement: True)
    setup.install(Path("python"), "test", cuda=False)
    assert commands[-1][3:] == ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"]
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def test_cuda_takes_one_step(setup: ModuleType, commands: list[list[str]]) -> None:
    setup.install(Path("python"), "test", cuda=True)
    assert [command[-1] for command in commands] == [".[vllm,dev,load]"]


def test_the_cpu_build_is_named_vllm(setup: ModuleType, tmp_path: Path) -> None:
    setup.name_vllm(tmp_path)
    setup.name_vllm(tmp_path)
    (found,) = metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", "0.32.0+cpu")
    assert {str(file) for file in found.files or []} == {
        str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()
    }


def test_a_vllm_of_that_name_is_left_alone(setup: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vllm-0.31.0+cpu.dist-info").mkdir()
    setup.name_vllm(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("wish", "answer"), [("cpu", False), ("cuda", True)])
def test_accelerator_by_name(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, wish: str, answer: bool) -> None:
    monkeypatch.setenv("ACCELERATOR", wish)
    assert setup.has_gpu() is answer


def test_accelerator_of_no_such_name(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATOR", "tpu")
    with pytest.raises(SystemExit, match="'tpu' is neither cpu nor cuda"):
        setup.has_gpu()


def test_no_python_is_new_enough(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "/no/such/python")
    with pytest.raises(SystemExit, match="/no/such/python: missing"):
        setup.find_python()
    monkeypatch.setenv("PYTHON", sys.executable)
    assert setup.find_python() == sys.executable


def test_settings_of_tools_need_no_set_up(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment is brought up to date when a requirement changes, and not when ruff's rules do."""
    (tmp_path / "tools").mkdir()
    project = tmp_path / "pyproject.toml"
    project.write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    before = setup.fingerprint("test", False)
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 119"))
    assert setup.fingerprint("test", False) == before
    project.write_text(project.read_text().replace("rich>=13", "rich>=14"))
    assert setup.fingerprint("test", False) != before
    assert setup.fingerprint("serve", False) != setup.fingerprint("test", False)


def test_failure_ends_the_set_up(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "logs" / "setup.log")
    with pytest.raises(SystemExit, match=r"(?s)no such package.*failed with status 3"):
        setup.run("a package", sys.executable, "-c", "print('no such package'); raise SystemExit(3)")
    assert "no such package" in setup.LOG.read_text()


def test_progress_in_place_of_output(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(setup, "EVERY_SECONDS", 0)
    setup.run("a package", sys.executable, "-c", "print('Collecting a')")
    said = capfd.readouterr().out
    assert said.splitlines() == ["setup: a package ...", "setup: a package: 1 packages looked at, 0 s"]
    assert "Collecting a" in setup.LOG.read_text()


def test_runs_without_our_packages() -> None:
    """The script starts on the system's Python, before anything is installed."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "tools" / "setup_env.py"), "--help"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
