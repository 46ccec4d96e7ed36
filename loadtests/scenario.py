# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the requests and load levels of a comparison, as TOML files in `scenarios/` or in any folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomllib
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FOLDER = Path(__file__).resolve().parent / "scenarios"

Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ScenarioError(ValueError):
    """A scenario cannot be run. The message names the file, the key and the accepted values."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(Strict):
    """The limits that a request must meet to count for goodput.

    Attributes:
        ttft_ms: the longest time to the first token.
        tpot_ms: the longest mean time between the request's tokens.
    """

    name: str
    ttft_ms: Positive
    tpot_ms: Positive


# MLPerf Inference's limits for Llama-2-70B: the server and the interactive scenario.
MLPERF = (
    Limits(name="server", ttft_ms=2000, tpot_ms=200),
    Limits(name="interactive", ttft_ms=450, tpot_ms=40),
)


class Sampling(Strict):
    """The sampling parameters; greedy by default."""

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)

    def body(self) -> dict[str, Any]:
        """The sampling part of a request's body."""
        return {"temperature": self.temperature} | self.model_dump(exclude_defaults=True)


@dataclass(frozen=True, order=True)
class Level:
    """A load level: a number of users that wait for their answers, or a rate of arrivals that do not wait.

    Attributes:
        users: the constant number of requests in flight (closed loop); 0 in open loop.
        rate: requests per second of a Poisson process (open loop); 0 in closed loop.
    """

    users: int = 0
    rate: float = 0.0

    @property
    def label(self) -> str:
        if self.rate:
            return f"{self.rate:g} requests/s"
        return f"{self.users} user{'' if self.users == 1 else 's'}"


class Scenario(Strict):
    """Requests of one kind, at several load levels.

    Attributes:
        name: the file's name without its suffix.
        why: the purpose of the scenario, in a sentence.
        prompt, output: the largest number of tokens of a prompt and of an answer.
        vary: lengths are uniform in the range from (1 - vary) to 1 times these; 0.2 means 80 to 100 %.
        shared_prefix: tokens at the start of a prompt that all requests of one of the `groups` groups share.
        text: prompts are words instead of token ids; the server counts their tokens.
        users, rates: the levels of closed and of open loop.
        warm_s: seconds of load before the measured window; users start during its first half.
        window_s: seconds of the measured window.
        drain_s: the time limit in seconds for requests to end after the window.
    """

    name: str
    why: str
    prompt: Count
    output: Count
    vary: float = Field(default=0.0, ge=0, lt=1)
    shared_prefix: int = Field(default=0, ge=0, strict=True)
    groups: Count = 1
    text: bool = False
    sampling: Sampling = Sampling()
    users: tuple[Count, ...] = ()
    rates: tuple[Positive, ...] = ()
    warm_s: Positive = 10.0
    window_s: Positive = 60.0
    drain_s: Positive = 120.0
    limits: tuple[Limits, ...] = MLPERF

    @model_validator(mode="after")
    def consistent(self) -> "Scenario":
        if not self.users and not self.rates:
            raise ValueError("needs at least one level: users = [...] or rates = [...]")
        if self.shared_prefix >= self.prompt:
            raise ValueError(f"shared_prefix = {self.shared_prefix} leaves nothing of prompt = {self.prompt}")
        return self

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(Level(users=users) for users in self.users) + tuple(Level(rate=rate) for rate in self.rates)

    @property
    def longest(self) -> int:
        """The tokens of the longest request, prompt and answer."""
        return self.prompt + self.output

    def changed(self, **changes: Any) -> "Scenario":
        """A copy with other values; values that are None do not change.

        Raises:
            ScenarioError: a value is not accepted.
        """
        given = {key: value for key, value in changes.items() if value is not None}
        return validated(self.model_dump() | given, f"scenario {self.name}")

    def scaled(self, factor: float) -> "Scenario":
        """A copy with lengths times a factor, at least two tokens each, so that there is a time between tokens.

        Raises:
            ScenarioError: the factor is not a positive number.
        """
        if not 0 < factor < float("inf"):
            raise ScenarioError(f"scale {factor!r}: a positive number is needed")
        prefix = round(self.shared_prefix * factor)
        prompt = max(2, round(self.prompt * factor))
        output = max(2, round(self.output * factor))
        return self.changed(prompt=prompt, output=output, shared_prefix=min(prefix, prompt - 1))


def validated(fields: dict[str, Any], where: str) -> Scenario:
    try:
        return Scenario.model_validate(fields)
    except ValidationError as error:
        raise ScenarioError("\n".join(f"{where}: {complaint(one)}" for one in error.errors())) from None


def complaint(error: Any) -> str:
    """One of pydantic's errors as `key: what is wrong, what is accepted`."""
    parts = [str(part) for part in error["loc"]]
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        parents: dict[str, type[Strict]] = {"sampling": Sampling, "limits": Limits}
        parent = parents.get(parts[0], Scenario) if len(parts) > 1 else Scenario
        known = [name for name in parent.model_fields if not (parent is Scenario and name == "name")]
        return f"unknown key {key!r}; known: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{key!r} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key} = {error['input']!r}: {message[0].lower()}{message[1:]}" if key else message


def names() -> list[str]:
    """The names of the repository's scenarios."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Scenario:
    """Loads a scenario by its name or file.

    Raises:
        ScenarioError: there is no such scenario, or the file is not valid.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        fields = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ScenarioError(f"no scenario {name!r}: choose from {', '.join(names())}, or name a .toml file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    if "name" in fields:
        raise ScenarioError(f"{path}: unknown key 'name'; a scenario is named by its file")
    return validated(fields | {"name": path.stem}, str(path))


def load_all(chosen: Sequence[str], scale: float = 1.0, **changes: Any) -> list[Scenario]:
    """Loads several scenarios and applies the same scale and changes to all.

    Raises:
        ScenarioError: a scenario is not valid, or occurs twice.
    """
    scenarios = [load(name).scaled(scale).changed(**changes) for name in chosen]
    twice = {scenario.name for scenario in scenarios if [other.name for other in scenarios].count(scenario.name) > 1}
    if twice:
        raise ScenarioError(f"scenario {', '.join(sorted(twice))} is named twice")
    return scenarios
