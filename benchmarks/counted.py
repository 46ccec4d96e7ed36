# SPDX-License-Identifier: Apache-2.0
"""Work of kernels as the emulator counts it: ours, and others' in a process that believes in a GPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THIRDPARTY = ROOT / "tests/emulator/thirdparty"
CHILD = "--child"

Kernel = dict[str, Any]


def profiled(run: Callable[[], object], arch: str, sms: int) -> list[Kernel]:
    """Kernels of one run, as the emulator's profile tells of them."""
    import emulator
    from emulator.profile import summary

    with emulator.device(arch, sms=sms, schedule="eager") as device:
        run()
    profile: Any = device.profile
    kernels: list[Kernel] = json.loads(summary(profile).to_json())["kernels"]
    return kernels


def pretend(arch: str) -> None:
    """Make this process believe in a GPU, and find others' packages."""
    sys.path.insert(0, str(THIRDPARTY))
    import_module("stand_in").pretend(arch, ROOT / ".peers")


def in_child(module: str, *arguments: str) -> list[Kernel]:
    """Kernels that `python -m module --child ...` answers.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", module, CHILD, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module}, {', '.join(arguments)}: {done.stderr[-2000:]}")
    found: list[Kernel] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(kernels: list[Kernel]) -> int:
    """A child's, and its exit status."""
    sys.stdout.write(json.dumps(kernels) + "\n")
    return 0


def main_kernel(kernels: list[Kernel]) -> Kernel:
    """The one that multiplies: over few keys, one that merges partial results may execute more."""
    return max(kernels, key=lambda kernel: sum(sum(role["flops"].values()) for role in kernel["roles"]))


def executed(kernel: Kernel, kind: str) -> int:
    """Warp instructions of a class, of all warps."""
    return sum(role["instructions"].get(kind, 0) for role in kernel["roles"])
