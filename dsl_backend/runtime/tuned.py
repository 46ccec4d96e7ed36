# SPDX-License-Identifier: Apache-2.0
"""Configurations that were measured to be faster than a heuristic's, as data: files of JSON, looked at once a process.

A family has a `Winners` object, with a file in the package. The file that DSL_BACKEND_WINNERS names is read in front of
it, and may hold several families' entries. What is wrong with an entry is a line of `dsl-backend doctor`; who serves
goes on without it.
"""

import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, TypeAdapter, ValidationError, model_validator

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.families import FAMILIES
from dsl_backend.log import warning_once
from dsl_backend.runtime.target import Target

# Changes when entries change their meaning.
FORMAT = 1

ProblemT = TypeVar("ProblemT", bound="Problem")


class Problem(BaseModel):
    """A class of problems that one entry decides: the facts that it depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def without(self: ProblemT, other: ProblemT) -> tuple[ProblemT, ...]:
        """What is left of this class where the other one is decided anew."""
        return () if self == other else (self,)


class Entry(BaseModel):
    """A measurement, as it stands in a file.

    Attributes:
        gpu: the product's name, as its driver tells it.
        versions: of the driver and of nvidia-cutlass-dsl.
        problem: the fields of the family's class of problems.
        kernel: the name of the configuration's kind.
        config: its fields.
        us, default_us: of a launch with it and with the heuristic's; over several rows their geometric mean.
        rows: that were timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    family: str
    gpu: str = Field(min_length=1)
    arch: str = Field(pattern=r"^sm_\d+a?$")
    date: datetime.date
    commit: str = Field(min_length=1)
    versions: dict[str, str]
    problem: dict[str, Any]
    kernel: str
    config: dict[str, Any]
    us: PositiveFloat
    default_us: PositiveFloat
    rows: tuple[str, ...] = ()

    @model_validator(mode="after")
    def is_faster(self) -> "Entry":
        if self.us >= self.default_us:
            raise ValueError(f"us {self.us} is not less than default_us {self.default_us}")
        return self


@dataclasses.dataclass(frozen=True)
class Winner(Generic[ProblemT]):
    """An entry whose problem and configuration are understood."""

    entry: Entry
    problem: ProblemT
    config: Any


def explained(error: ValidationError) -> str:
    """Pydantic's findings in one line, each with the value."""
    found = []
    for one in error.errors():
        place = ".".join(str(part) for part in one["loc"])
        given = "" if one["type"] in ("missing", "value_error") else f" (it is {one['input']!r})"
        message = one["msg"].removeprefix("Value error, ") + given
        found.append(f"{place}: {message}" if place else message)
    return "; ".join(found)


def not_json(name: str) -> None:
    """Python reads NaN and Infinity, which no measurement is."""
    raise ValueError(f"{name} is no number there")


def entries_of(path: Path) -> list[Any]:
    """The entries of a file, as JSON has them.

    Raises:
        InvalidInput: it cannot be read, or is not a file of winners.
    """
    try:
        found = json.loads(path.read_text(), parse_constant=not_json)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("winners"), list):
        raise InvalidInput(f'{path} is no file of winners: {{"format": {FORMAT}, "winners": [...]}} is needed')
    return found["winners"]


class Winners(Generic[ProblemT]):
    """A family's winners.

    Args:
        family: its name in `families.FAMILIES`.
        file: the package's own.
        problem: the type of its classes of problems.
        configs: name -> kind of configuration, a frozen dataclass.
    """

    def __init__(self, family: str, file: Path, problem: type[ProblemT], configs: Mapping[str, type]) -> None:
        self.family, self.file, self.problem, self.configs = family, file, problem, configs

    def kernel_name(self, config: Any) -> str:
        """What a configuration's kind is called in a file."""
        return next(name for name, kind in self.configs.items() if kind is type(config))

    def understood(self, raw: Any) -> Winner[ProblemT]:
        """An entry of this family.

        Raises:
            InvalidInput: it is not one; the message names what is wrong, and what would be accepted.
        """
        try:
            # As JSON: there, tuples and dates have a strict form too.
            entry = Entry.model_validate_json(json.dumps(raw))
            problem = self.problem.model_validate_json(json.dumps(entry.problem))
        except ValidationError as error:
            raise InvalidInput(explained(error)) from None
        kind: Any = self.configs.get(entry.kernel)
        if kind is None:
            raise InvalidInput(f"kernel {entry.kernel!r} is not one of {', '.join(self.configs)}")
        known = [one.name for one in dataclasses.fields(kind)]
        if strange := sorted(set(entry.config) - set(known)):
            raise InvalidInput(f"config has {', '.join(strange)}: {entry.kernel} has {', '.join(known) or 'no fields'}")
        try:
            config = TypeAdapter(kind).validate_json(json.dumps(entry.config), strict=True)
        except ValidationError as error:
            raise InvalidInput(f"config: {explained(error)}") from None
        return Winner(entry, problem, config)

    def read(self, path: Path) -> tuple[list[Winner[ProblemT]], list[str]]:
        """The family's entries of a file, and what is wrong with the file."""
        try:
            raw = entries_of(path)
        except InvalidInput as error:
            return [], [str(error)]
        found, problems = [], []
        for place, one in enumerate(raw):
            family = one.get("family") if isinstance(one, dict) else None
            try:
                if family not in FAMILIES:
                    raise InvalidInput(f"family {family!r} is not one of {', '.join(FAMILIES)}")
                if family == self.family:
                    found.append(self.understood(one))
            except InvalidInput as error:
                problems.append(f"{path}: entry {place}: {error}")
        return found, problems

    @property
    def files(self) -> list[Path]:
        """That are read, the user's first."""
        own = envs.WINNERS.read()
        return [*([own] if own is not None else []), self.file]

    @cached_property
    def found(self) -> tuple[list[Winner[ProblemT]], list[str]]:
        """All of this process's winners, and what is wrong in the files; read once."""
        read = [self.read(path) for path in self.files]
        return [one for winners, _ in read for one in winners], [one for _, problems in read for one in problems]

    def on(self, target: Target, *, any_gpu: bool = False) -> Iterator[Winner[ProblemT]]:
        """Those measured on the target's very GPU, the user's before the package's.

        Args:
            any_gpu: where the target names no GPU, those of every GPU of its architecture: what may be asked for there.
        """
        winners, problems = self.found
        if problems:
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            warning_once(f"measured configurations are left out: {problems[0]}{more}; `dsl-backend doctor` lists all")
        gpus = {one.entry.gpu for one in winners} if any_gpu and target.gpu is None else {target.gpu}
        return (one for one in winners if one.entry.arch == target.arch and one.entry.gpu in gpus)

    def forget(self) -> None:
        """Read the files anew when somebody asks."""
        self.__dict__.pop("found", None)

    def entry(self, problem: ProblemT, config: Any, **facts: Any) -> Winner[ProblemT]:
        """A new winner.

        Args:
            facts: the other fields of Entry.
        """
        fields = {
            "family": self.family,
            "problem": problem.model_dump(mode="json"),
            "kernel": self.kernel_name(config),
            "config": dataclasses.asdict(config),
            **facts,
        }
        return Winner(Entry(**fields), problem, config)

    def merged(
        self, old: Sequence[Winner[ProblemT]], gpu: str, measured: Sequence[ProblemT], new: Sequence[Winner[ProblemT]]
    ) -> list[Winner[ProblemT]]:
        """Old winners, but for classes of problems that were measured again on a GPU, and the new ones."""
        kept = []
        for one in old:
            left = [one.problem]
            for again in measured if one.entry.gpu == gpu else ():
                left = [part for whole in left for part in whole.without(again)]
            for part in left:
                entry = one.entry.model_copy(update={"problem": part.model_dump(mode="json")})
                kept.append(Winner(entry, part, one.config))
        return [*kept, *new]

    def save(self, path: Path, gpu: str, measured: Sequence[ProblemT], new: Sequence[Winner[ProblemT]]) -> int:
        """Merge new winners into a file, or write it; returns how many entries of the family it then has.

        Raises:
            InvalidInput: the file is there and something is wrong with it, or it cannot be written.
        """
        raw = entries_of(path) if path.exists() else []
        old, problems = self.read(path) if path.exists() else ([], [])
        if problems:
            raise InvalidInput("; ".join(problems))
        mine = [one.entry.model_dump(mode="json") for one in self.merged(old, gpu, measured, new)]
        mine.sort(key=lambda one: (one["gpu"], json.dumps(one["problem"])))
        write(path, [one for one in raw if one["family"] != self.family] + mine)
        return len(mine)


def write(path: Path, entries: Sequence[Any]) -> None:
    """Put entries in the place of a file: it is never half written.

    Raises:
        InvalidInput: that is not possible.
    """
    lines = ",\n".join("  " + json.dumps(one) for one in entries)
    text = f'{{"format": {FORMAT}, "winners": [' + (f"\n{lines}\n" if lines else "") + "]}\n"
    scratch = None
    try:
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".winners-")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        # mkstemp's 0600 would keep a server of another user from reading it.
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
