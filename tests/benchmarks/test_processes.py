# SPDX-License-Identifier: Apache-2.0
"""What the checks and benches start processes with."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import processes


def test_free_port_is_not_one_that_the_system_gives_to_connections() -> None:
    """Another process's connection or server may get such a port before the server that it was for is up."""
    ports = {processes.free_port() for _ in range(50)}
    assert len(ports) > 10
    assert all(processes.FIRST_PORT <= port < processes.first_ephemeral_port() for port in ports)


@pytest.mark.parametrize("listens", [True, False])
def test_free_port_is_one_that_can_be_bound(monkeypatch: pytest.MonkeyPatch, listens: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", processes.free_port()))
        taken = server.getsockname()[1]
        if not listens:
            server.close()
        monkeypatch.setattr("random.sample", lambda ports, count: [taken])
        if not listens:
            assert processes.free_port() == taken
            return
        with pytest.raises(OSError, match="none of 100 ports between 10240 and"):
            processes.free_port()


@pytest.mark.parametrize(("text", "first"), [("32768\t60999\n", 32768), ("1024\t65535\n", 11240), (None, 32768)])
def test_first_ephemeral_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, first: int) -> None:
    path = tmp_path / "ip_local_port_range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(processes, "EPHEMERAL", path)
    assert processes.first_ephemeral_port() == first


def test_sigterm_ends_what_a_process_started() -> None:
    """Without `exit_on_sigterm` the parent ends at once, and the child sleeps on."""
    child = "import time; time.sleep(60)"
    parent = f"""
import os, signal, subprocess, sys, time
from benchmarks.processes import exit_on_sigterm, stop_group
exit_on_sigterm()
process = subprocess.Popen([sys.executable, "-c", {child!r}], preexec_fn=os.setpgrp)
try:
    print(process.pid, flush=True)
    time.sleep(60)
finally:
    stop_group(process, signal.SIGTERM)  # SIGINT is ignored where a shell started the tests in the background
"""
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=processes.ROOT, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
