# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request: its tokens with their times, or the kind of its error."""

import enum
import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


class Failure(enum.Enum):
    """Why a request gave no answer that counts; the values are the words of reports."""

    CONNECTION = "connection"
    STATUS = "HTTP status"
    STREAM = "error in the stream"
    TRUNCATED = "truncated stream"
    TOKENS = "wrong token count"
    UNFINISHED = "not finished in time"
    LOST = "lost by the client"


@dataclass
class Sample:
    """A request and what came back.

    Attributes:
        sent: seconds on the machine's monotonic clock; with arrivals of an open loop, when it was due.
        output: tokens asked for.
        at_us: microseconds from `sent` to every piece that brought tokens; pieces of one read from the socket share it.
        tokens: of the answer so far, at each of these.
        prompt_tokens: as the server counts.
        failure: a Failure's value; empty where all went well.
        detail: of the failure.
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
        """Between tokens, on the average; None for an answer that came in one piece or in one read."""
        more = self.tokens[-1] - self.tokens[0]
        return self.answer_ms / more if more and self.answer_ms else None

    @property
    def answer_ms(self) -> float:
        """From the first piece to the last."""
        return (self.at_us[-1] - self.at_us[0]) / 1000

    @property
    def together(self) -> float | None:
        """Share of pieces after the first that came in one read with the one before; None where there are none."""
        if len(self.at_us) < 2:
            return None
        return sum(a == b for a, b in pairwise(self.at_us)) / (len(self.at_us) - 1)


@dataclass
class Reader:
    """Reads the server-sent events of a streamed completion into a sample.

    Attributes:
        prompt_tokens: that the prompt has; None where only the server can tell.
    """

    sample: Sample
    prompt_tokens: int | None
    total: int = 0
    ended: bool = False

    def line(self, now: float, line: bytes) -> None:
        """Take a line of the stream that arrived at a time of the monotonic clock."""
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
        # A server without running counts says its total in a last piece that brings no tokens.
        if piece.get("choices") and (grown or not usage):
            self.sample.at_us.append(round(1e6 * (now - self.sample.sent)))
            self.sample.tokens.append(self.total)

    def finish(self) -> None:
        """The stream is over: judge what came."""
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
        """Without running counts: the total, given evenly to the pieces that it came in."""
        pieces = len(self.sample.tokens)
        self.sample.tokens = [max(1, self.total * (index + 1) // pieces) for index in range(pieces)]
