# SPDX-License-Identifier: Apache-2.0
"""The result of a request: its tokens with their times, or the kind of its error."""

import enum
import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


class Failure(enum.Enum):
    """Why a request has no valid answer. The values are the texts in reports."""

    CONNECTION = "connection"
    STATUS = "HTTP status"
    STREAM = "error in the stream"
    TRUNCATED = "truncated stream"
    TOKENS = "wrong token count"
    UNFINISHED = "not finished in time"
    LOST = "lost by the client"


@dataclass
class Sample:
    """A request and its result.

    Attributes:
        sent: seconds on the machine's monotonic clock; in open loop the time when the request was due.
        output: the number of requested tokens.
        at_us: microseconds from `sent` to every chunk with tokens. Chunks of one socket read have the same time.
        tokens: the total number of tokens at each of these times.
        prompt_tokens: tokens of the prompt, as the server counts them.
        failure: a Failure's value; empty if there was none.
        detail: details of the failure.
    """

    sent: float
    output: int
    at_us: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    failure: str = ""
    detail: str = ""

    def fail(self, failure: Failure, detail: str) -> None:
        self.failure, self.detail = failure.value, detail[:300]

    def to_json(self) -> str:
        return json.dumps({"kind": "sample", **asdict(self)}, separators=(",", ":"))

    @property
    def ttft_ms(self) -> float:
        return self.at_us[0] / 1000

    @property
    def e2e_ms(self) -> float:
        return self.at_us[-1] / 1000

    @property
    def tpot_ms(self) -> float | None:
        """The mean time between tokens; None if the answer came in one chunk or in one read."""
        more = self.tokens[-1] - self.tokens[0]
        return self.answer_ms / more if more and self.answer_ms else None

    @property
    def answer_ms(self) -> float:
        """The time from the first chunk to the last."""
        return (self.at_us[-1] - self.at_us[0]) / 1000

    @property
    def together(self) -> float | None:
        """The share of later chunks that came in the same read as the previous one; None if there is one chunk."""
        if len(self.at_us) < 2:
            return None
        return sum(a == b for a, b in pairwise(self.at_us)) / (len(self.at_us) - 1)


@dataclass
class Reader:
    """Reads the server-sent events of a streamed completion into a sample.

    Attributes:
        prompt_tokens: tokens of the prompt; None if only the server knows.
    """

    sample: Sample
    prompt_tokens: int | None
    total: int = 0
    ended: bool = False

    def line(self, now: float, line: bytes) -> None:
        """Processes a line of the stream that arrived at a time of the monotonic clock."""
        if not line.startswith(b"data:") or self.sample.failure:
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            piece: Any = json.loads(data)
        except ValueError:
            self.sample.fail(Failure.STREAM, f"not JSON: {data[:100]!r}")
            return
        if "error" in piece:
            self.sample.fail(Failure.STREAM, str(piece["error"]))
            return
        usage = piece.get("usage") or {}
        self.total = usage.get("completion_tokens", self.total)
        self.sample.prompt_tokens = usage.get("prompt_tokens", self.sample.prompt_tokens)
        grown = self.total > (self.sample.tokens[-1] if self.sample.tokens else 0)
        # A server without continuous usage reports the total in a last chunk without tokens.
        if piece.get("choices") and (grown or not usage):
            self.sample.at_us.append(round(1e6 * (now - self.sample.sent)))
            self.sample.tokens.append(self.total)

    def finish(self) -> None:
        """Checks the answer after the end of the stream."""
        sample = self.sample
        if sample.failure:
            return
        if not self.ended:
            sample.fail(Failure.TRUNCATED, f"after {self.total} of {sample.output} tokens")
        elif self.total != sample.output or not sample.tokens:
            sample.fail(Failure.TOKENS, f"{self.total} tokens for {sample.output}")
        elif self.prompt_tokens is not None and sample.prompt_tokens != self.prompt_tokens:
            sample.fail(Failure.TOKENS, f"{sample.prompt_tokens} prompt tokens for {self.prompt_tokens}")
        if sample.tokens and not sample.failure and sample.tokens[-1] != self.total:
            self.spread()

    def spread(self) -> None:
        """Without continuous usage: distributes the total evenly over the chunks."""
        pieces = len(self.sample.tokens)
        self.sample.tokens = [max(1, self.total * (index + 1) // pieces) for index in range(pieces)]
