# SPDX-License-Identifier: Apache-2.0
"""Counts the work of kernels in the emulator: this package's here, and a peer's in a process with a simulated GPU."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .clock import stand_in

ROOT = Path(__file__).resolve().parents[1]
THIRDPARTY = ROOT / "tests/emulator/thirdparty"
CHILD = "--child"

Kernel = dict[str, Any]


def profiled(
    run: Callable[[], object], arch: str, sms: int, tensors: Sequence[Any] = (), *, keep_findings: bool = False
) -> list[Kernel]:
    """The kernels of one run, from the emulator's profile; a finding of its checks raises, unless they are kept.

    Args:
        tensors: that kernels are given by their addresses alone.
    """
    import emulator
    from emulator.profile import summary

    with emulator.device(arch, sms=sms, schedule="eager", keep_findings=keep_findings) as device:
        for tensor in tensors:
            device.register(tensor)
        run()
    profile: Any = device.profile
    kernels: list[Kernel] = json.loads(summary(profile).to_json())["kernels"]
    return kernels


def pretend(arch: str) -> None:
    """Makes torch and other packages see a simulated GPU in this process, and makes the peers importable."""
    sys.path.insert(0, str(THIRDPARTY))  # for the cases of peers
    stand_in.pretend(arch, stand_in.PEERS)


def in_child(module: str, *arguments: str) -> list[Kernel]:
    """The kernels that `python -m module --child ...` prints.

    Raises:
        SystemExit: the child process failed.
    """
    command = [sys.executable, "-m", module, CHILD, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module}, {', '.join(arguments)}: {done.stderr[-2000:]}")
    found: list[Kernel] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(kernels: list[Kernel]) -> int:
    """Prints the kernels for the parent process; returns the child's exit status."""
    sys.stdout.write(json.dumps(kernels) + "\n")
    return 0


def main_kernel(kernels: list[Kernel]) -> Kernel:
    """The kernel with the most FLOPs. Over few keys a combine kernel may execute more instructions."""
    return max(kernels, key=lambda kernel: sum(sum(role["flops"].values()) for role in kernel["roles"]))


def executed(kernel: Kernel, kind: str) -> int:
    """The number of warp instructions of a class that all warps execute."""
    return sum(role["instructions"].get(kind, 0) for role in kernel["roles"])
