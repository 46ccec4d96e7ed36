# SPDX-License-Identifier: Apache-2.0
"""Servers that run already: named, checked, asked what they serve; never started and never stopped."""

import contextlib
import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loadtests.servers import BackendError, counters_in

PATIENCE_S = 20
NAME = re.compile(r"[\w.+-]+")


class UrlError(ValueError):
    """A server that cannot be loaded; the message says which and why."""


@dataclass(frozen=True)
class Remote:
    """A server that answers.

    Attributes:
        name: in tables, as a backend's.
        model: that it serves.
        longest: tokens of a request; None where it does not say.
        version: of vLLM; empty where it does not say.
        detokenize: whether it makes text of tokens.
        key: for the Authorization header; may be empty.
    """

    name: str
    url: str
    model: str
    longest: int | None
    version: str
    detokenize: bool
    key: str

    @property
    def facts(self) -> dict[str, Any]:
        return {"url": self.url, "model": self.model, "vllm": self.version, "max_model_len": self.longest, "devices": 1}

    def alive(self) -> bool:
        """Whether anybody listens; a server that is slow to take a connection is alive."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except ConnectionError:
            return False
        except OSError:
            return True
        return True

    def ended(self) -> BackendError:
        return BackendError(f"{self.url} was gone under load", "")

    def counters(self) -> dict[str, float]:
        with contextlib.suppress(UrlError):
            return counters_in(ask(self.name, self.url, "/metrics", self.key).decode(errors="replace"))
        return {}


def parse(words: Sequence[str]) -> dict[str, str]:
    """NAME=URL words as name -> address without a trailing slash.

    Raises:
        UrlError: a word is none, or a name or an address comes twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, _, url = word.partition("=")
        url = url.rstrip("/")
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            good = False
        if not NAME.fullmatch(name) or not good:
            raise UrlError(f"--url {word}: NAME=URL is needed, such as dsl=http://127.0.0.1:8000")
        if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            raise UrlError(f"--url {word}: an address alone is needed, such as {parts.scheme}://{parts.hostname}:8000")
        if name in found:
            raise UrlError(f"--url: {name} is named twice")
        if url in found.values():
            raise UrlError(f"--url {word}: named twice, and its prefix cache would answer the second time")
        found[name] = url
    return found


def ask(name: str, url: str, path: str, key: str, body: object | None = None) -> bytes:
    """GET, or POST where there is a body.

    Raises:
        UrlError: no answer, or one of another status than 200.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    # The load goes to the server itself, past any proxy; so does this.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE_S) as response:
            data: bytes = response.read()
            return data
    except urllib.error.HTTPError as error:
        hint = "; OPENAI_API_KEY takes its key" if error.code in (401, 403) else ""
        text = error.read(300).decode(errors="replace").strip()
        raise UrlError(f"{name}: {url}{path} answers {error.code}{hint} {text}".rstrip()) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UrlError(f"{name}: {url} cannot be reached: {reason}") from None


def reach(name: str, url: str, model: str | None, key: str) -> Remote:
    """Check a server's health, read its model's name, and try a completion of two tokens.

    Args:
        model: that is wanted; None for the first one.

    Raises:
        UrlError: it is not healthy, does not have the model, or does not stream completions with their token counts.
    """
    try:
        ask(name, url, "/health", key)
    except UrlError as error:
        # Others than vLLM have no such route.
        if "answers 404" not in str(error):
            raise
    try:
        entries = {entry["id"]: entry for entry in json.loads(ask(name, url, "/v1/models", key))["data"]}
    except (ValueError, LookupError, TypeError):
        raise UrlError(
            f"{name}: {url}/v1/models does not list models: is this a server of the completions API?"
        ) from None
    if not entries or (model is not None and model not in entries):
        raise UrlError(f"{name}: {url} has no model {model or ''}; it has: {', '.join(entries) or 'none'}")
    chosen = model or next(iter(entries))
    longest = entries[chosen].get("max_model_len")
    version = ""
    with contextlib.suppress(UrlError, ValueError, AttributeError):
        version = str(json.loads(ask(name, url, "/version", key)).get("version", ""))
    return Remote(name, url, chosen, longest, version, detokenizes(name, url, chosen, key), key)


def detokenizes(name: str, url: str, model: str, key: str) -> bool:
    """Whether a server makes text of tokens; a load asks of it what it can."""
    body = {"model": model, "prompt": [16, 17, 18], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    complaint = ""
    for detokenize in (True, False):
        try:
            more = {} if detokenize else {"detokenize": False, "return_token_ids": True}
            answer = ask(name, url, "/v1/completions", key, body | more).decode(errors="replace")
        except UrlError as error:
            complaint = complaint or str(error)
            continue
        if '"completion_tokens"' in answer and "[DONE]" in answer:
            return detokenize
        complaint = complaint or f"{name}: {url} streams no completion with token counts: {answer[:200]}"
    raise UrlError(complaint)
