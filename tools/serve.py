# SPDX-License-Identifier: Apache-2.0
"""Serve a model through dsl; without one, a small random model that is made first.

.venv/bin/python tools/serve.py [--host 127.0.0.1] [--port 8000] [--model MODEL] [-- flags of vllm serve]
"""

import argparse
import contextlib
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".cache" / "demo"
# Run by its path.
sys.path.insert(0, str(ROOT))

from loadtests.exposure import LOCAL, ExposureError, mask, refuse_exposed, values_of  # noqa: E402


def make_demo() -> Path:
    """The demo model's folder; it is written where it is missing or older than what writes it."""
    source = ROOT / "integration" / "models.py"
    config = DEMO / "config.json"
    if not config.exists() or config.stat().st_mtime < source.stat().st_mtime:
        print(f"serve: writing a small random model to {DEMO}", flush=True)
        subprocess.run([sys.executable, "-m", "integration.models", "demo", str(DEMO)], cwd=ROOT, check=True)
    return DEMO


def require_free(host: str, port: int) -> None:
    """Ends the program if another one listens there: vLLM says so only when it has loaded the model."""
    # Other errors are vLLM's to explain.
    with contextlib.suppress(OSError, OverflowError):
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            # As vLLM's own: a port whose last connections are ending is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    sys.exit(f"serve: port {port} of {host} is in use: name another one with --port")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default=LOCAL, help=f"address to listen on (default: {LOCAL}, this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="", help="a folder or a name that vLLM knows; default: the demo")
    parser.add_argument("flags", nargs="*", help="further flags of vllm serve")
    options = parser.parse_args()
    host = (values_of(options.flags, "--host") or [options.host])[-1]
    try:
        refuse_exposed(host)
    except ExposureError as error:
        parser.error(str(error))
    require_free(host, options.port)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model or str(make_demo())]
    command += ["--attention-backend", "dsl", "--host", host, "--port", str(options.port)]
    if not options.model:
        command += ["--served-model-name", "demo"]
        # The demo is small: it needs neither 90 % of a GPU, nor half of the host's memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if not any(flag.startswith(("--gpu-memory-utilization", "--kv-cache-memory")) for flag in options.flags):
            command += ["--gpu-memory-utilization", "0.3"]
    command += options.flags
    print(f"serve: {' '.join(mask(command))}", flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
