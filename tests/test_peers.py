# SPDX-License-Identifier: Apache-2.0
"""The script that installs others' kernels: when it installs, and that nothing else sees them."""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_peers", ROOT / "tools" / "setup_peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, status: int) -> list[list[str]]:
    """Commands that main() runs, each ended with the status and leaving a file."""
    ran: list[list[str]] = []

    def run(words: list[str], **_: object) -> SimpleNamespace:
        ran.append(words)
        folder.mkdir()
        (folder / "kernel.py").touch()
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(peers.subprocess, "run", run)
    monkeypatch.setenv("PEERS", str(folder))
    return ran


def test_it_installs_once(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = answer(peers, monkeypatch, tmp_path / "peers", 0)
    peers.main()
    peers.main()
    assert len(ran) == 1
    assert "--no-deps" in ran[0]
    assert all("==" in pin and pin in ran[0] for pin in peers.PINS)


def test_other_pins_make_it_anew(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    ran = answer(peers, monkeypatch, folder, 0)
    peers.main()
    (folder / "of_the_old_version.py").touch()
    monkeypatch.setattr(peers, "PINS", ("quack-kernels==0.0.1",))
    peers.main()
    assert len(ran) == 2
    assert not (folder / "of_the_old_version.py").exists()


def test_what_failed_is_not_there(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer(peers, monkeypatch, tmp_path / "peers", 1)
    with pytest.raises(SystemExit):
        peers.main()
    assert not (tmp_path / "peers").exists()


@pytest.mark.parametrize("package", ["flash_attn", "quack"])
def test_nothing_else_sees_them(peers: ModuleType, package: str) -> None:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    assert not [place for place in places if Path(place).is_relative_to(peers.folder())]
