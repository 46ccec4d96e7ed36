# SPDX-License-Identifier: Apache-2.0
"""The script that installs others' kernels: when it installs, and that nothing else sees them."""

import importlib.util
import subprocess
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
        if words[0] == "git":
            return SimpleNamespace(returncode=1, stdout=b"")
        ran.append(words)
        folder.mkdir()
        (folder / "kernel.py").touch()
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(peers.subprocess, "run", run)
    monkeypatch.setenv("PEERS", str(folder))
    monkeypatch.setenv("CUTLASS", "/nowhere")
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


@pytest.fixture
def clone(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with two files in place of CUTLASS's examples, at the commit that is wanted."""
    folder = tmp_path / "clone"
    texts = {"helpers/one.py": "ONE = 1\n", "cute/two.py": "TWO = 2\n"}
    for path, text in texts.items():
        (folder / peers.CUTLASS_FOLDER / path).parent.mkdir(parents=True)
        (folder / peers.CUTLASS_FOLDER / path).write_text(text)

    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "two files")
    monkeypatch.setattr(peers, "CUTLASS_COMMIT", git("rev-parse", "HEAD"))
    monkeypatch.setattr(peers, "EXAMPLES", tuple(texts))
    monkeypatch.setattr(peers, "CUTLASS_DIGEST", peers.digest({path: text.encode() for path, text in texts.items()}))
    monkeypatch.setenv("CUTLASS", str(folder))
    monkeypatch.setenv("PEERS", str(tmp_path / "peers"))
    monkeypatch.setattr(peers, "is_current", lambda _: True)
    return folder


def test_examples_come_from_a_clone_once(
    peers: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    examples = tmp_path / "peers" / "cutlass_examples"
    peers.main()
    assert (examples / "helpers" / "one.py").read_text() == "ONE = 1\n"
    monkeypatch.setenv("CUTLASS", "/nowhere")
    peers.main()
    assert (examples / "cute" / "two.py").is_file()
    # Others than those that there are: they are not kept.
    monkeypatch.setattr(peers, "CUTLASS_DIGEST", "0" * 64)
    peers.main()
    assert not examples.exists()


def test_examples_that_are_others_are_not_taken(
    peers: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "CUTLASS_DIGEST", "0" * 64)
    peers.main()
    assert "are not those that were tested" in capsys.readouterr().out
    assert not (tmp_path / "peers" / "cutlass_examples").exists()


@pytest.mark.parametrize("package", ["flash_attn", "quack"])
def test_nothing_else_sees_them(peers: ModuleType, package: str) -> None:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    assert not [place for place in places if Path(place).is_relative_to(peers.folder())]
