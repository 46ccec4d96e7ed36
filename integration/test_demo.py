# SPDX-License-Identifier: Apache-2.0
"""What `make serve` runs: the demo, with vLLM's own defaults."""

import sys
from collections.abc import Iterator

import pytest

from integration.environment import ROOT, device
from integration.server import Server, running

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("demo") / "log"
    with running([sys.executable, str(ROOT / "tools" / "serve.py")], log) as server:
        yield server


def test_name(demo: Server) -> None:
    assert [model["id"] for model in demo.ask("/v1/models").body["data"]] == ["demo"]


def test_completion(demo: Server) -> None:
    choice = demo.complete("Permission is granted", max_tokens=16)
    assert choice["finish_reason"] == "length"
    assert choice["text"].strip()


def test_chat(demo: Server) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who may copy this?"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    reply = demo.ask("/v1/chat/completions", body)
    assert reply.status == 200, reply
    assert reply.body["choices"][0]["message"]["content"].strip()
    assert reply.body["usage"]["completion_tokens"] == 16


def test_log_says_that_dsl_serves(demo: Server) -> None:
    lines = [line for line in demo.log.splitlines() if "dsl serves attention" in line]
    assert lines
    assert all(device().serves(line) for line in lines)
