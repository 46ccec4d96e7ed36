# SPDX-License-Identifier: Apache-2.0
"""Install others' CuTe DSL kernels into a folder of their own; quick when there is nothing left to do.

    python3 tools/setup_peers.py

The emulator's tests run these kernels unmodified. They stay out of the environment: vLLM chooses its attention by what
it can import, and flash_attn must not be among that. Only the tests' subprocesses put the folder on their path.

Works with the standard library of Python 3.8 or newer. Environment variables:

    VENV    the environment whose pip installs them, and whose Python they are for (default .venv)
    PEERS   the folder (default .peers)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# flash-attn-4 says it is for every later CuTe DSL, but its later betas need one that 4.6.0 is not.
PINS = ("flash-attn-4==4.0.0b20", "quack-kernels==0.6.3", "einops==0.8.2", "torch-c-dlpack-ext==0.1.5")
STAMP = ".set-up"


def folder() -> Path:
    return ROOT / os.environ.get("PEERS", ".peers")


def wanted() -> str:
    """What a complete folder's stamp says."""
    return "\n".join(PINS) + "\n"


def is_current(peers: Path) -> bool:
    stamp = peers / STAMP
    return stamp.is_file() and stamp.read_text() == wanted()


def install(python: Path, peers: Path) -> None:
    """Fill the folder anew; SystemExit with pip's status where it fails, and then the folder is not there."""
    # pip leaves what it finds in a target folder as it is, also the files of another version.
    shutil.rmtree(peers, ignore_errors=True)
    command = [python, "-m", "pip", "install", "--quiet", "--quiet", "--no-deps", "--target", peers, *PINS]
    words = [str(word) for word in command]
    print(f"peers: {' '.join(words)}", flush=True)
    status = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    if status:
        shutil.rmtree(peers, ignore_errors=True)
        sys.exit(f"peers: failed with status {status}")
    (peers / STAMP).write_text(wanted())


def main() -> None:
    peers = folder()
    if not is_current(peers):
        install(ROOT / os.environ.get("VENV", ".venv") / "bin" / "python", peers)


if __name__ == "__main__":
    main()
