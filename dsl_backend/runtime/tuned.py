# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations: measured to be faster than a heuristic's, and kept as JSON files that a process reads once.

A kind of kernels has one `TunedConfigs` object, with a file in the package. The file named by DSL_BACKEND_TUNED_CONFIGS
is read before it, and may hold records of all kinds. `dsl-backend doctor` lists the records that are wrong; a server
leaves them out.
"""

import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.families import TUNED
from dsl_backend.log import warning_once
from dsl_backend.quant.format import scaled_format
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import Target

# Changes when records change their meaning.
FORMAT = 1

ProblemShapeT = TypeVar("ProblemShapeT", bound="ProblemShape")
RowsProblemShapeT = TypeVar("RowsProblemShapeT", bound="RowsProblemShape")


def named_format(name: str) -> str:
    """The name of a format of scaled values. Raises InvalidInput, a ValueError: there is no such format."""
    scaled_format(name)
    return name


# A field of problem shapes.
FormatName = Annotated[str, AfterValidator(named_format)]


class ProblemShape(BaseModel):
    """The problems that one record holds for: the facts that the choice of a configuration depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def without(self: ProblemShapeT, other: ProblemShapeT) -> tuple[ProblemShapeT, ...]:
        """The part of this shape that remains where the other one was measured again."""
        return () if self == other else (self,)


class RowsProblemShape(ProblemShape):
    """Problems of some sizes, for a range of rows.

    Attributes:
        least_rows, most_rows: both inclusive.
    """

    least_rows: PositiveInt
    most_rows: PositiveInt

    @model_validator(mode="after")
    def is_a_range(self: RowsProblemShapeT) -> RowsProblemShapeT:
        if self.least_rows > self.most_rows:
            raise ValueError(f"least_rows {self.least_rows} is more than most_rows {self.most_rows}")
        return self

    def holds(self, rows: int) -> bool:
        return self.least_rows <= rows <= self.most_rows

    def of_rows(self: RowsProblemShapeT, least: int, most: int) -> RowsProblemShapeT:
        return self.model_copy(update={"least_rows": least, "most_rows": most})

    def without(self: RowsProblemShapeT, other: RowsProblemShapeT) -> tuple[RowsProblemShapeT, ...]:
        if self.of_rows(1, 1) != other.of_rows(1, 1):
            return (self,)
        ranges = (
            (self.least_rows, min(self.most_rows, other.least_rows - 1)),
            (max(self.least_rows, other.most_rows + 1), self.most_rows),
        )
        return tuple(self.of_rows(least, most) for least, most in ranges if least <= most)


class Measurement(BaseModel):
    """A record as it is written in a file.

    Attributes:
        gpu: the product's name, as its driver gives it.
        chip: what the GPU said of itself. The record holds for GPUs that say about the same; without it, for GPUs of
            the same name.
        versions: of the driver and of nvidia-cutlass-dsl.
        problem: the fields of the family's ProblemShape.
        kernel: the name of the configuration's type.
        config: its fields.
        us, default_us: of a launch with it and with the heuristic's; over several rows their geometric mean.
        rows: that were timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    family: str
    gpu: str = Field(min_length=1)
    arch: str = Field(pattern=r"^sm_\d+a?$")
    chip: Chip | None = None
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
    def is_faster(self) -> "Measurement":
        if self.us >= self.default_us:
            raise ValueError(f"us {self.us} is not less than default_us {self.default_us}")
        return self

    def holds_for(self, target: Target) -> bool:
        """Whether it was measured on a GPU like the target's."""
        if self.arch != target.arch or target.gpu is None:
            return False
        if self.chip is None or target.chip is None:
            return self.gpu == target.gpu
        return self.chip.is_like(target.chip)


@dataclasses.dataclass(frozen=True)
class TuningRecord(Generic[ProblemShapeT]):
    """A measurement with its problem and configuration as objects."""

    measurement: Measurement
    problem: ProblemShapeT
    config: Any


def explained(error: ValidationError) -> str:
    """Pydantic's findings in one line, each with the value."""
    found = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"])
        given = "" if one["type"] in ("missing", "value_error") else f" (it is {one['input']!r})"
        message = one["msg"].removeprefix("Value error, ") + given
        found.append(f"{field}: {message}" if field else message)
    return "; ".join(found)


def not_json(name: str) -> None:
    """Python reads NaN and Infinity, which no measurement is."""
    raise ValueError(f"{name} is no number there")


def records_of(path: Path) -> list[Any]:
    """The records of a file, as JSON has them.

    Raises:
        InvalidInput: it cannot be read, or is not a file of tuned configurations.
    """
    try:
        found = json.loads(path.read_text(), parse_constant=not_json)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("records"), list):
        raise InvalidInput(
            f'{path} is no file of tuned configurations: {{"format": {FORMAT}, "records": [...]}} is needed'
        )
    return found["records"]


class TunedConfigs(Generic[ProblemShapeT]):
    """The tuned configurations of a family.

    Args:
        family: its name in `families.TUNED`.
        file: the package's own.
        problem: the type of its problem shapes.
        configs: name -> type of configuration, a frozen dataclass.
    """

    def __init__(self, family: str, file: Path, problem: type[ProblemShapeT], configs: Mapping[str, type]) -> None:
        self.family, self.file, self.problem, self.configs = family, file, problem, configs

    def kernel_name(self, config: Any) -> str:
        """The name of a configuration's type in a file."""
        return next(name for name, kind in self.configs.items() if kind is type(config))

    def understood(self, raw: Any) -> TuningRecord[ProblemShapeT]:
        """A record of this family.

        Raises:
            InvalidInput: it is not one; the message names what is wrong, and what would be accepted.
        """
        try:
            # As JSON: there, tuples and dates have a strict form too.
            measurement = Measurement.model_validate_json(json.dumps(raw))
            problem = self.problem.model_validate_json(json.dumps(measurement.problem))
        except ValidationError as error:
            raise InvalidInput(explained(error)) from None
        kind: Any = self.configs.get(measurement.kernel)
        if kind is None:
            raise InvalidInput(f"kernel {measurement.kernel!r} is not one of {', '.join(self.configs)}")
        known = [one.name for one in dataclasses.fields(kind)]
        if strange := sorted(set(measurement.config) - set(known)):
            raise InvalidInput(
                f"config has {', '.join(strange)}: {measurement.kernel} has {', '.join(known) or 'no fields'}"
            )
        try:
            config = TypeAdapter(kind).validate_json(json.dumps(measurement.config), strict=True)
        except ValidationError as error:
            raise InvalidInput(f"config: {explained(error)}") from None
        return TuningRecord(measurement, problem, config)

    def read(self, path: Path) -> tuple[list[TuningRecord[ProblemShapeT]], list[str]]:
        """The family's records of a file, and what is wrong with the file."""
        try:
            raw = records_of(path)
        except InvalidInput as error:
            return [], [str(error)]
        found, problems = [], []
        for index, one in enumerate(raw):
            family = one.get("family") if isinstance(one, dict) else None
            try:
                if family not in TUNED:
                    raise InvalidInput(f"family {family!r} is not one of {', '.join(TUNED)}")
                if family == self.family:
                    found.append(self.understood(one))
            except InvalidInput as error:
                problems.append(f"{path}: record {index}: {error}")
        return found, problems

    @property
    def files(self) -> list[Path]:
        """The files that are read, the user's first."""
        own = envs.TUNED_CONFIGS.read()
        return [*([own] if own is not None else []), self.file]

    @cached_property
    def found(self) -> tuple[list[TuningRecord[ProblemShapeT]], list[str]]:
        """All records of this process, and what is wrong in the files; read once."""
        read = [self.read(path) for path in self.files]
        return [one for records, _ in read for one in records], [one for _, problems in read for one in problems]

    def on(self, target: Target, *, any_gpu: bool = False) -> Iterator[TuningRecord[ProblemShapeT]]:
        """The records of GPUs like the target's; the user's before the package's.

        Args:
            any_gpu: where the target names no GPU, the records of every GPU of its architecture.
        """
        records, problems = self.found
        if problems:
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            warning_once(f"tuned configurations are left out: {problems[0]}{more}; `dsl-backend doctor` lists all")
        every = any_gpu and target.gpu is None
        measurements = ((one, one.measurement) for one in records)
        return (one for one, of in measurements if of.holds_for(target) or (every and of.arch == target.arch))

    def fitting(
        self,
        problem: ProblemShapeT,
        target: Target,
        objections: Callable[[Any], Sequence[str]],
        *,
        any_gpu: bool = False,
    ) -> Iterator[Any]:
        """The configurations of this very problem's records that serve it.

        Args:
            objections: why a configuration does not serve; empty if it does.
            any_gpu: as in `on`.
        """
        for record in self.on(target, any_gpu=any_gpu):
            if record.problem == problem and not objections(record.config):
                yield record.config

    def forget(self) -> None:
        """Read the files again at the next call."""
        self.__dict__.pop("found", None)

    def record(self, problem: ProblemShapeT, config: Any, **facts: Any) -> TuningRecord[ProblemShapeT]:
        """A new record.

        Args:
            facts: the other fields of Measurement.
        """
        fields = {
            "family": self.family,
            "problem": problem.model_dump(mode="json"),
            "kernel": self.kernel_name(config),
            "config": dataclasses.asdict(config),
            **facts,
        }
        return TuningRecord(Measurement(**fields), problem, config)

    def merged(
        self,
        old: Sequence[TuningRecord[ProblemShapeT]],
        target: Target,
        measured: Sequence[ProblemShapeT],
        new: Sequence[TuningRecord[ProblemShapeT]],
    ) -> list[TuningRecord[ProblemShapeT]]:
        """Old records without the problem shapes that were measured again on the target, then the new ones."""
        kept = []
        for one in old:
            left = [one.problem]
            for again in measured if one.measurement.holds_for(target) else ():
                left = [part for whole in left for part in whole.without(again)]
            for part in left:
                measurement = one.measurement.model_copy(update={"problem": part.model_dump(mode="json")})
                kept.append(TuningRecord(measurement, part, one.config))
        return [*kept, *new]

    def save(
        self, path: Path, target: Target, measured: Sequence[ProblemShapeT], new: Sequence[TuningRecord[ProblemShapeT]]
    ) -> int:
        """Merge new records into a file, or write it; returns how many records of the family it then has.

        Raises:
            InvalidInput: the file is there and something is wrong with it, or it cannot be written.
        """
        raw = records_of(path) if path.exists() else []
        old, problems = self.read(path) if path.exists() else ([], [])
        if problems:
            raise InvalidInput("; ".join(problems))
        mine = [one.measurement.model_dump(mode="json") for one in self.merged(old, target, measured, new)]
        mine.sort(key=lambda one: (one["gpu"], json.dumps(one["problem"])))
        write(path, [one for one in raw if one["family"] != self.family] + mine)
        return len(mine)


def ranges(
    configs: TunedConfigs[RowsProblemShapeT], target: Target, problem_of: Callable[[int], RowsProblemShapeT]
) -> list[tuple[RowsProblemShapeT, Any]]:
    """Ranges of rows that a layer has records for on GPUs like the target's, with the configurations.

    Args:
        problem_of: the layer's problem for one row, on so many SMs.
    """
    if target.gpu is None:
        return []
    asked = problem_of(target.sm_count)
    return [(one.problem, one.config) for one in configs.on(target) if one.problem.of_rows(1, 1) == asked]


def faster(
    configs: TunedConfigs[RowsProblemShapeT],
    target: Target,
    problem_of: Callable[[int], RowsProblemShapeT],
    unrecorded: Sequence[tuple[int, int]],
    theirs: type,
) -> list[RowsProblemShapeT]:
    """Ranges of rows for which a layer is taken to be faster than other kernels, by its records.

    Args:
        problem_of: as `ranges` has it.
        unrecorded: (first, last) row of the ranges of a layer without records on an SM90, where it was timed.
        theirs: the type that stands for the other kernels in a record.
    """
    found = ranges(configs, target, problem_of)
    if not found and target.gpu is not None and target.kernel_arch == "sm90":
        return [problem_of(target.sm_count).of_rows(*rows) for rows in unrecorded]
    return [problem for problem, config in found if not isinstance(config, theirs)]


def write(path: Path, records: Sequence[Any]) -> None:
    """Replace a file by these records; a reader never sees it half written.

    Raises:
        InvalidInput: that is not possible.
    """
    lines = ",\n".join("  " + json.dumps(one) for one in records)
    text = f'{{"format": {FORMAT}, "records": [' + (f"\n{lines}\n" if lines else "") + "]}\n"
    scratch = None
    try:
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".tuned-")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        # mkstemp's 0600 would keep a server of another user from reading it.
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
