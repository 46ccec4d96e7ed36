# SPDX-License-Identifier: Apache-2.0
"""What installs the browser of the checks: when it does, when it does not, and that it never ends a set-up."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "setup_browser.py"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script on a Debian, as root, in a fresh environment without a browser."""
    spec = importlib.util.spec_from_file_location("setup_browser", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("VENV", str(tmp_path))
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    return module


@pytest.fixture
def asked(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What apt-get was asked for; it can do nothing."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 100)

    monkeypatch.setattr(setup.subprocess, "run", run)
    return commands


def verbs(commands: list[list[str]]) -> list[str]:
    return [word for command in commands for word in command if word in ("update", "install")]


def test_tries_once_and_says_why_not(
    setup: ModuleType, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    setup.main()
    assert verbs(asked) == ["install", "update"]
    assert "no chromium: apt-get could not install it" in capsys.readouterr().out
    setup.main()
    assert len(asked) == 2
    assert capsys.readouterr().out == ""


def test_lists_are_updated_where_it_takes_that(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def apt(*words: str) -> bool:
        asked.append(words[0])
        return len(asked) > 1

    monkeypatch.setattr(setup, "apt", apt)
    assert setup.install()
    assert asked == ["install", "update", "install"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("os.geteuid", lambda: 1000, "not root"), ("shutil.which", lambda name: None, "no apt-get")],
)
def test_machines_where_it_cannot(
    setup: ModuleType,
    asked: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
    reason: str,
) -> None:
    module, _, attribute = name.partition(".")
    monkeypatch.setattr(getattr(setup, module), attribute, value)
    setup.main()
    assert asked == []
    assert reason in capsys.readouterr().out


def test_nothing_to_do(setup: ModuleType, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.shutil, "which", lambda name: "/usr/bin/" + name)
    setup.main()
    assert asked == []


def test_a_slow_mirror_does_not_hold_the_set_up(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: float) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(setup.subprocess, "run", run)
    assert not setup.apt("update")


def test_runs_without_our_packages() -> None:
    """Whatever it finds here, it ends well."""
    source = f"import runpy; runpy.run_path({str(SCRIPT)!r})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", source], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
