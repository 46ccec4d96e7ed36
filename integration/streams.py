# SPDX-License-Identifier: Apache-2.0
"""Streamed completions, each on its own socket: many at once, and clients that disconnect in the middle."""

import http.client
import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from integration.offline import TOP, Answer

PATH = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}
REPLY_S = 300

Result = TypeVar("Result")


@dataclass(frozen=True)
class Streamed:
    """The result of one streamed completion.

    Attributes:
        answer: its tokens, with log-probabilities if they were requested.
        finish: the server's finish reason.
        counted: the number of tokens as the server counts them.
        ended: whether the stream had its end event; a closed connection alone is not enough.
        left: whether the client closed the connection in the middle on purpose.
        error: the error, if any: a status, an error event, or a connection error.
    """

    answer: Answer
    finish: str | None = None
    counted: int | None = None
    ended: bool = False
    left: bool = False
    error: str | None = None

    def fault(self, tokens: int) -> str | None:
        """Why this is not a complete answer of the given number of tokens; None if it is."""
        if self.error is not None:
            return self.error
        if not self.ended:
            return "the client left" if self.left else "the stream broke off"
        got = len(self.answer.tokens)
        if got != tokens or self.counted != tokens or self.finish != "length":
            return f"{got} tokens, {self.counted} by usage, finished by {self.finish!r}: expected {tokens} by 'length'"
        return None


def body_of(prompt: Sequence[int], tokens: int, logprobs: bool = True, **options: object) -> dict[str, object]:
    """The body of a greedy, streamed request for a number of tokens to the model `demo`."""
    body: dict[str, object] = {
        "model": "demo",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if logprobs:
        body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
    return body | options


def steps_of(logprobs: dict[str, Any]) -> list[dict[int, float]]:
    """For each step, token -> log-probability, from a reply with token ids."""
    return [
        {int(token.removeprefix("token_id:")): value for token, value in step.items()}
        for step in logprobs["top_logprobs"]
    ]


def connect(url: str, timeout_s: float = REPLY_S) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)


def stream(url: str, body: dict[str, object], leave_after: int | None = None, timeout_s: float = REPLY_S) -> Streamed:
    """Sends a request and reads its answer. Errors are part of the result.

    Args:
        leave_after: close the connection after this number of chunks.
        timeout_s: the longest wait for the next chunk.
    """
    answer = Answer([], [], [], [])
    finish: str | None = None
    counted: int | None = None
    pieces = 0
    connection = connect(url, timeout_s)
    try:
        connection.request("POST", PATH, json.dumps(body), HEADERS)
        response = connection.getresponse()
        if response.status != 200:
            return Streamed(answer, error=f"status {response.status}: {response.read()[:300]!r}")
        for event in events(response):
            if event is None:
                return Streamed(answer, finish, counted, ended=True)
            if "error" in event:
                return Streamed(answer, finish, counted, error=f"error event: {event['error']}")
            if event.get("usage"):
                counted = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                answer.tokens.extend(choice.get("token_ids") or [])
                answer.logprobs.extend(steps_of(choice["logprobs"]) if choice.get("logprobs") else [])
                finish = choice["finish_reason"] or finish
                pieces += 1
            if leave_after is not None and pieces >= leave_after:
                return Streamed(answer, finish, counted, left=True)
        return Streamed(answer, finish, counted)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Streamed(answer, finish, counted, error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any] | None]:
    """Yields the stream's events; None is the end event.

    Raises:
        ValueError: a line is not an event, such as a truncated one.
    """
    while line := response.readline():
        text = line.decode().strip()
        if not text:
            continue
        if not text.startswith("data: "):
            raise ValueError(f"no event: {text[:200]!r}")
        payload = text.removeprefix("data: ")
        yield None if payload == "[DONE]" else json.loads(payload)


def vanish(url: str, body: dict[str, object], sent: float = 1.0) -> None:
    """Sends a request, or the first part of it, and resets the connection without reading anything.

    Args:
        sent: the share of the body to send.
    """
    data = json.dumps(body).encode()
    connection = connect(url)
    connection.putrequest("POST", PATH)
    for name, value in HEADERS.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data[: round(len(data) * sent)])
    # With a linger of zero seconds, closing sends a reset, as when the client's machine fails.
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of the calls, in order. Every call has its own thread, so that all run concurrently."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]
