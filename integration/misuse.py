# SPDX-License-Identifier: Apache-2.0
"""Misuse that a server must survive: clients that disconnect, connections that break, invalid requests."""

import math
from dataclasses import dataclass
from typing import Any

from integration.judge import Request
from integration.models import VOCABULARY
from integration.server import Server
from integration.streams import body_of, stream, vanish

CONTEXT = 512  # --max-model-len of the misused servers


@dataclass(frozen=True, kw_only=True)
class Bad:
    """An invalid request.

    Attributes:
        body: the fields besides the model's name and the number of tokens.
    """

    id: str
    body: dict[str, Any]
    status: int = 400


BAD = (
    Bad(id="token id out of range", body={"prompt": [VOCABULARY + 5]}),
    Bad(id="negative token id", body={"prompt": [-1]}),
    Bad(id="prompt longer than the context", body={"prompt": [7] * (CONTEXT + 1)}),
    Bad(id="empty prompt", body={"prompt": []}),
    Bad(id="negative temperature", body={"prompt": "x", "temperature": -1}),
    Bad(id="no choices", body={"prompt": "x", "n": 0}),
    Bad(id="unknown model", body={"prompt": "x", "model": "another"}, status=404),
    Bad(id="temperature in words", body={"prompt": "x", "temperature": "hot"}),
    Bad(id="negative number of tokens", body={"prompt": "x", "max_tokens": -3}),
    Bad(id="too many log-probabilities", body={"prompt": "x", "logprobs": 10**6}),
    Bad(id="top-p above one", body={"prompt": "x", "top_p": 1.5}),
    Bad(id="top-p of zero", body={"prompt": "x", "top_p": 0}),
    Bad(id="negative top-p", body={"prompt": "x", "top_p": -0.5}),
    Bad(id="top-k below -1", body={"prompt": "x", "top_k": -2}),
    Bad(id="top-k with a fraction", body={"prompt": "x", "top_k": 2.5}),
    Bad(id="min-p above one", body={"prompt": "x", "min_p": 2}),
    Bad(id="negative min-p", body={"prompt": "x", "min_p": -0.1}),
    Bad(id="temperature above two", body={"prompt": "x", "temperature": 3}),
    Bad(id="temperature that is no number", body={"prompt": "x", "temperature": math.nan}),
    Bad(id="infinite temperature", body={"prompt": "x", "temperature": math.inf}),
    Bad(id="top-p that is no number", body={"prompt": "x", "top_p": math.nan}),
    Bad(id="min-p that is no number", body={"prompt": "x", "min_p": math.nan}),
    Bad(id="seed beyond 64 bits", body={"prompt": "x", "seed": 2**63}),
)


def refused(server: Server, bad: Bad) -> str | None:
    """Sends an invalid request; returns None if the server refused it, else a description of the reply."""
    reply = server.ask("/v1/completions", {"model": "demo", "max_tokens": 4} | bad.body)
    if reply.status != bad.status or not reply.body["error"]["message"]:
        return f"{bad.id}: {reply}"
    return None


def abandon(server: Server, request: Request, pieces: int) -> str | None:
    """Closes the connection after a part of the answer; returns what went wrong before that, or None."""
    streamed = stream(server.url, body_of(request.prompt, CONTEXT - len(request.prompt)), leave_after=pieces)
    return None if streamed.left else f"disconnected too late: {streamed}"


def break_off(server: Server, request: Request, sent: float, streaming: bool) -> str | None:
    """Resets the connection before any answer, after sending all or a part of the request."""
    body = body_of(request.prompt, CONTEXT - len(request.prompt))
    if not streaming:
        del body["stream"], body["stream_options"]
    vanish(server.url, body, sent)
    return None
