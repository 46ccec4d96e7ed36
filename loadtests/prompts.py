# SPDX-License-Identifier: Apache-2.0
"""The requests of a scenario. The same seed gives the same requests, and all requests differ."""

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.scenarios import FIRST_ID
from loadtests.scenario import Scenario

# Words that are one token each in most vocabularies. The server reports the true length of a text.
TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most made
after also did many off before must well back through years where much your way down should because long each just
those people too world still see work here between life being under never day same another know while last might us
great old year come since against go came right used take three
"""
WORDS = tuple(TEXT.split())


@dataclass(frozen=True)
class Request:
    """A request to send.

    Attributes:
        prompt: token ids or text.
        prompt_tokens: tokens of the prompt; None for a text, whose tokens only the server knows.
        output: the number of tokens that the answer must have.
    """

    prompt: list[int] | str
    prompt_tokens: int | None
    output: int


@dataclass(frozen=True)
class Source:
    """Makes the requests of a scenario.

    Attributes:
        vocabulary: the upper bound of token ids.
        seed: another seed gives other requests, and other shared prefixes too.
    """

    scenario: Scenario
    vocabulary: int
    seed: str

    def request(self, *number: int) -> Request:
        """The request with an identifying number, such as (process, user, turn)."""
        dice = random.Random(f"{self.seed}/{number}")
        prompt, output = (self.length(longest, dice) for longest in (self.scenario.prompt, self.scenario.output))
        shared = self.shared(dice.randrange(self.scenario.groups))
        own = self.tokens(max(1, prompt - len(shared)), dice)
        if self.scenario.text:
            return Request(" ".join(WORDS[token % len(WORDS)] for token in shared + own), None, output)
        return Request(shared + own, len(shared) + len(own), output)

    def length(self, longest: int, dice: random.Random) -> int:
        return max(1, dice.randint(round(longest * (1 - self.scenario.vary)), longest))

    def shared(self, group: int) -> list[int]:
        return self.tokens(self.scenario.shared_prefix, random.Random(f"{self.seed}/shared/{group}"))

    def tokens(self, count: int, dice: random.Random) -> list[int]:
        return dice.choices(range(FIRST_ID, self.vocabulary), k=count)

    def body(self, request: Request, model: str, detokenize: bool) -> dict[str, Any]:
        """The body of POST /v1/completions."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.output,
            "ignore_eos": True,
            "stream": True,
            # With continuous usage every chunk has the number of tokens so far.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self.scenario.sampling.body(),
        }
        return body if detokenize else body | {"detokenize": False, "return_token_ids": True}
