# SPDX-License-Identifier: Apache-2.0
"""Servers that already run: found, refused, and compared."""

import json
from pathlib import Path

import pytest
from server_stand_in import serving

from benchmarks.processes import free_port
from loadtests import compare, remote
from loadtests.remote import UrlError

SMALL = ("--scenario", "128-128", "--scale", "0.1", "--users", "2", "--warm-seconds", "0.5", "--window-seconds", "2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dsl"], "NAME=URL is needed"),
        (["=http://a"], "NAME=URL is needed"),
        (["a=ftp://b"], "NAME=URL is needed"),
        (["a=http://b:port"], "NAME=URL is needed"),
        (["a=http://b:8000/v1"], "an address alone is needed, such as http://b:8000"),
        (["a=http://b", "a=http://c"], "a is named twice"),
        (["a=http://b", "c=http://b/"], "named twice"),
    ],
)
def test_urls_that_are_none(words: list[str], says: str) -> None:
    with pytest.raises(UrlError, match=says):
        remote.parse(words)


def test_a_server_is_asked_what_it_serves() -> None:
    with serving() as server:
        found = remote.reach("dsl", server.url, None, "")
        assert (found.model, found.longest, found.version, found.detokenize) == ("stand-in", 4096, "", True)
        assert found.alive()
        with pytest.raises(UrlError, match="has no model other; it has: stand-in"):
            remote.reach("dsl", server.url, "other", "")
        server.health = 503
        with pytest.raises(UrlError, match="/health answers 503"):
            remote.reach("dsl", server.url, None, "")
    assert not found.alive()


def test_a_server_that_wants_a_key() -> None:
    with serving() as server:
        server.key = "open-sesame"
        with pytest.raises(UrlError, match="answers 401; set OPENAI_API_KEY to its key"):
            remote.reach("dsl", server.url, None, "")
        assert remote.reach("dsl", server.url, None, "open-sesame").model == "stand-in"


def test_a_server_that_fails_requests() -> None:
    with serving("status") as server, pytest.raises(UrlError, match="/v1/completions answers 503"):
        remote.reach("dsl", server.url, None, "")


@pytest.mark.parametrize("other", [["--backends", "dsl"], ["--offline"], ["--", "--max-num-seqs", "8"]])
def test_what_is_of_servers_that_are_started(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.main(["--url", "dsl=http://127.0.0.1:9", *other])
    assert caught.value.code == 2
    assert "cannot be used with --url" in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert compare.main(["--url", f"dsl={url}", "--out", str(tmp_path / "out")]) == compare.WRONG_USE
    assert f"dsl: {url} cannot be reached: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers, with a key, in turn; their model's name is read, and the key is written nowhere."""
    monkeypatch.setenv("OPENAI_API_KEY", "open-sesame")
    with serving() as one, serving() as other:
        one.key = other.key = "open-sesame"
        words = ["--url", f"here={one.url}", "--url", f"there={other.url}", *SMALL, "--rounds", "1"]
        assert compare.main([*words, "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["backend"] for line in lines if line["kind"] == "run"] == ["here", "there"]
    assert lines[0]["urls"] == {"here": one.url, "there": other.url}
    assert {body["model"] for body in one.bodies} == {"stand-in"}
    assert one.bodies[-1]["prompt"] in [body["prompt"] for body in other.bodies] or len(one.bodies) > len(other.bodies)
    assert "here over there: " in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    assert one.url in text
    assert "tokens/s/server" in text
    assert "open-sesame" not in text + (tmp_path / "results.jsonl").read_text()
