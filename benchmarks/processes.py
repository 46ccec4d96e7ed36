# SPDX-License-Identifier: Apache-2.0
"""Child processes that run vLLM: they find the plugin, and what they started ends with them."""

import contextlib
import os
import random
import signal
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import dsl_backend

ROOT = Path(dsl_backend.__file__).resolve().parent.parent
STOP_S = 30
# Lower ports belong to well-known services.
FIRST_PORT = 10240
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def plugin_folder() -> Path | None:
    """A folder for PYTHONPATH that declares the entry point, where the package itself is not installed."""
    if any(point.name == "dsl" for point in metadata.entry_points(group="vllm.general_plugins")):
        return None
    import tomllib  # here, since an installed package does not need it and Python 3.10 has none

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = ROOT / ".cache" / "plugin"
    info = folder / "dsl_backend-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsl-backend\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs vLLM: like ours, with the plugin in reach."""
    paths = [str(ROOT), *([str(folder)] if (folder := plugin_folder()) else [])]
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # The checkpoints are on disk: nothing is to be looked up on a network.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # GiB; the smallest that the CPU build takes.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment.pop("VLLM_PLUGINS", None)
    return environment | changes


def free_port(tries: int = 100) -> int:
    """A port on which nothing listens, for a server that starts later.

    It is below the ports that the system gives to outgoing connections and to servers that ask for any port. One of
    those would be free now, and may be another process's by the time that the server is up.

    Raises:
        OSError: of so many random ports none was free.
    """
    for port in random.sample(range(FIRST_PORT, first_ephemeral_port()), tries):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of {tries} ports between {FIRST_PORT} and {first_ephemeral_port()} is free")


def first_ephemeral_port() -> int:
    """The first port that the system gives to whoever asks for any; Linux's default where that is unknown."""
    try:
        return max(int(EPHEMERAL.read_text().split()[0]), FIRST_PORT + 1000)
    except OSError:
        return 32768


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in this process, so that `finally` blocks stop what it started."""
    signal.signal(signal.SIGTERM, end)


def end(number: int, frame: object) -> None:
    # `timeout` sends its signal twice; the second one must not interrupt the clean-up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def stop_group(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGINT, wait_s: float = STOP_S) -> None:
    """End a process that leads a group, and that group; returns when they are gone.

    Args:
        wait_s: seconds that it gets after each of the signals, before the next one.
    """
    for number in (first, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
