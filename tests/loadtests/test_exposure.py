# SPDX-License-Identifier: Apache-2.0
"""Where servers listen, and what is written about their flags."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.exposure import ExposureError, is_local, mask, refuse_exposed, scrub, secrets_of, values_of

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "abc", "def", "--port", "1"], ["--api-key", "***", "***", "--port", "1"]),
        (["--api_key=abc"], ["--api_key=***"]),
        (["--hf-token", "abc"], ["--hf-token", "***"]),
        (["--ssl-keyfile-password=a=b"], ["--ssl-keyfile-password=***"]),
        (["--ssl-keyfile", "key.pem"], ["--ssl-keyfile", "key.pem"]),
        (
            ["--max-num-batched-tokens", "512", "--tokenizer", "x"],
            ["--max-num-batched-tokens", "512", "--tokenizer", "x"],
        ),
        (["HF_TOKEN=abc", "A=b"], ["HF_TOKEN=***", "A=b"]),
        (
            ["--x", '{"apiKey": "abc", "n": [{"password": 1}], "k": 2}'],
            ["--x", '{"apiKey": "***", "n": [{"password": "***"}], "k": 2}'],
        ),
        (["dsl=http://me:secret@host:1"], ["dsl=http://***@host:1"]),
        (["--header", "Authorization: Bearer abcdef"], ["--header", "Authorization: Bearer ***"]),
        (["--y", "http://h/?api_key=abc&b=1"], ["--y", "http://h/?api_key=***&b=1"]),
        (["--z", "hf_abcdefghij"], ["--z", "***"]),
        (["--x.secret", "abc"], ["--x.secret", "***"]),
    ],
)
def test_what_is_masked(words: list[str], shown: list[str]) -> None:
    assert mask(words) == shown


def test_secrets_are_found_in_other_texts() -> None:
    words = ["--api-key", "alpha-1", "--hf-token=beta-22", "--x", json.dumps({"token": "gamma"}), "--pin-key", "ab"]
    secrets = secrets_of(words, {"MY_API_KEY": "delta-345", "PATH": "/usr/bin", "A_TOKEN": "short"})
    assert secrets == ["delta-345", "alpha-1", "beta-22", "gamma"]
    found = scrub({"log": ["alpha-1 beta-22", 3, {"x": "gammadelta-345 ab"}]}, secrets)
    assert found == {"log": ["*** ***", 3, {"x": "****** ab"}]}


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_which_hosts_are_public(host: str, local: bool) -> None:
    assert is_local(host) == local
    refuse_exposed(host, {})
    refuse_exposed(host, {"VLLM_SERVER_DEV_MODE": "0"})
    if local:
        refuse_exposed(host, {"VLLM_SERVER_DEV_MODE": "1"})
    else:
        with pytest.raises(ExposureError, match="VLLM_SERVER_DEV_MODE=1"):
            refuse_exposed(host, {"VLLM_SERVER_DEV_MODE": "1"})


def test_values_of_a_flag() -> None:
    assert values_of(["--host", "a", "--hosts", "b", "--host=c", "d"], "--host") == ["a", "c", "d"]
    assert values_of(["--api_key", "a", "b", "-q", "c"], "--api-key") == ["a", "b"]


def serve(*arguments: str, mode: str = "0") -> subprocess.CompletedProcess[str]:
    """tools/serve.py, which prints a command and becomes it: here a Python that ends at once."""
    code = (
        "import os, runpy, sys; os.execv = lambda *_: sys.exit(0);"
        f"sys.argv = ['serve.py', '--model', 'x', *{list(arguments)!r}];"
        "runpy.run_path('tools/serve.py', run_name='__main__')"
    )
    environment = {"VLLM_SERVER_DEV_MODE": mode, "PATH": "/usr/bin"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "host"),
    [((), "127.0.0.1"), (("--host", "0.0.0.0"), "0.0.0.0"), (("--", "--host", "10.1.1.1"), "10.1.1.1")],
)
def test_make_serve_listens_on_this_machine_unless_told_otherwise(arguments: tuple[str, ...], host: str) -> None:
    done = serve(*arguments)
    assert (done.returncode, f"--host {host} --port 8000" in done.stdout) == (0, True), done
    done = serve(*arguments, mode="1")
    public = host != "127.0.0.1"
    assert (done.returncode, "development mode" in done.stderr) == (2 if public else 0, public), done


def test_make_serve_refuses_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--port", str(port))
        said = f"serve: port {port} of 127.0.0.1 is in use: name another one with --port"
        assert (done.returncode, done.stderr.strip(), done.stdout) == (1, said, "")
    assert serve("--port", str(port)).returncode == 0


def test_make_serve_prints_no_secret() -> None:
    done = serve("--", "--api-key", "open-sesame")
    assert "--api-key ***" in done.stdout
    assert "open-sesame" not in done.stdout
