# SPDX-License-Identifier: Apache-2.0
"""Servers that already run: checks them and asks for their model. They are never started or stopped."""

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
    """A server cannot be used. The message says which one and why."""


@dataclass(frozen=True)
class Remote:
    """A server that answers.

    Attributes:
        name: its name in tables, like that of a backend.
        model: the model that it serves.
        longest: the most tokens of a request; None if the server does not report it.
        version: the version of vLLM; empty if the server does not report it.
        detokenize: whether it converts tokens to text.
        key: the key for the Authorization header; may be empty.
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
        """Whether a server listens on the address. A server that is slow to accept a connection is alive."""
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
    """Parses NAME=URL words; returns name -> address without a trailing slash.

    Raises:
        UrlError: a word is not valid, or a name or an address occurs twice.
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
    """Sends GET, or POST if there is a body; returns the answer.

    Raises:
        UrlError: there is no answer, or its status is not 200.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    # Like the load, this bypasses any proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE_S) as response:
            data: bytes = response.read()
            return data
    except urllib.error.HTTPError as error:
        hint = "; set OPENAI_API_KEY to its key" if error.code in (401, 403) else ""
        text = error.read(300).decode(errors="replace").strip()
        raise UrlError(f"{name}: {url}{path} answers {error.code}{hint} {text}".rstrip()) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UrlError(f"{name}: {url} cannot be reached: {reason}") from None


def reach(name: str, url: str, model: str | None, key: str) -> Remote:
    """Checks a server's health, reads its model's name, and tries a completion of two tokens.

    Args:
        model: the name of the model to use; None for the server's first one.

    Raises:
        UrlError: it is not healthy, does not have the model, or does not stream completions with their token counts.
    """
    try:
        ask(name, url, "/health", key)
    except UrlError as error:
        # Servers other than vLLM do not have this route.
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
    """Whether a server converts tokens to text, so that the load uses a format that the server supports."""
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
