# SPDX-License-Identifier: Apache-2.0
"""Sends concurrent streaming completions over HTTP and measures the replies."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .scenarios import prompts

MODEL = "measured"  # the name that the server gives its model
REQUEST_S = 300


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output: int


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply to a request.

    Attributes:
        error: empty if there was none.
        tokens: the number of generated tokens, as the server reports it.
        first_s, last_s: seconds until the first and the last piece of the stream.
    """

    error: str = ""
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run of concurrent requests.

    Attributes:
        errors: the distinct errors.
        failed: the number of requests with an error.
        rate: output tokens per second, from sending the first request to the end of the last reply.
        first_s: median seconds until a request's first token.
        token_s: median over the requests of the mean seconds between tokens.
    """

    seconds: float
    errors: tuple[str, ...]
    failed: int
    rate: float
    first_s: float
    token_s: float


def mixed(count: int, longest_prompt: int, longest_output: int, vocabulary: int, seed: int) -> list[Request]:
    """Requests of many lengths, powers of two and lengths between them. The same seed gives the same requests."""
    generator = random.Random(seed)

    def length(longest: int) -> int:
        return int(min(longest, 4) * (longest / min(longest, 4)) ** generator.random())

    return [
        Request(prompts(1, length(longest_prompt), vocabulary, seed * count + index)[0], length(longest_output))
        for index in range(count)
    ]


async def complete(session: Any, url: str, request: Request) -> Reply:
    """Sends one streaming completion. Errors are part of the reply."""
    body = {
        "model": MODEL,
        "prompt": request.prompt,
        "max_tokens": request.output,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = last = 0.0
    tokens, ended = -1, False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return Reply(error=f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                text = line.decode().strip()
                if not text.startswith("data:"):
                    continue
                text = text.removeprefix("data:").strip()
                if text == "[DONE]":
                    ended = True
                    continue
                piece = json.loads(text)
                if "error" in piece:
                    return Reply(error=f"in the stream: {str(piece['error'])[:200]}")
                if piece.get("choices"):
                    last = time.perf_counter() - began
                    first = first or last
                if piece.get("usage"):
                    tokens = piece["usage"]["completion_tokens"]
    except Exception as error:  # whatever a broken connection raises
        return Reply(error=f"{type(error).__name__}: {error}"[:200])
    if not ended:
        return Reply(error="the stream ended early")
    if tokens != request.output:
        return Reply(error=f"{tokens} tokens instead of {request.output}", tokens=max(tokens, 0))
    return Reply(tokens=tokens, first_s=first, last_s=last)


async def send_all(url: str, requests: Sequence[Request]) -> Outcome:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    connector = aiohttp.TCPConnector(limit=len(requests))
    # A chunk of the stream that lists a long prompt's ids is one long line.
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22) as session:
        began = time.perf_counter()
        replies = await asyncio.gather(*(complete(session, url, request) for request in requests))
        seconds = time.perf_counter() - began
    return summarize(replies, requests, seconds)


def summarize(replies: Sequence[Reply], requests: Sequence[Request], seconds: float) -> Outcome:
    good = [(reply, request) for reply, request in zip(replies, requests, strict=True) if not reply.error]
    gaps = [(reply.last_s - reply.first_s) / (request.output - 1) for reply, request in good if request.output > 1]
    return Outcome(
        seconds=seconds,
        errors=tuple(dict.fromkeys(reply.error for reply in replies if reply.error)),
        failed=len(replies) - len(good),
        rate=sum(reply.tokens for reply, _ in good) / seconds,
        first_s=statistics.median(reply.first_s for reply, _ in good) if good else 0.0,
        token_s=statistics.median(gaps) if gaps else 0.0,
    )


def send(url: str, requests: Sequence[Request]) -> Outcome:
    """Sends all requests at once; returns when each has its answer or an error."""
    return asyncio.run(send_all(url, requests))
