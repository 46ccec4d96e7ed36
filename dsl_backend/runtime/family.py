# SPDX-License-Identifier: Apache-2.0
"""An operator family, as the commands, the benchmarks and the vLLM plugin see it.

A family is a package named in `families.NAMES`, whose module `family` defines FAMILY. Modules are imported by name when
they are asked for: the run-time depends on no operator.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsl_backend.errors import InvalidInput, by_reason
from dsl_backend.families import NAMES
from dsl_backend.runtime.dispatch import Entry
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.tuned import TunedConfigs


@dataclass(frozen=True)
class Benchmark:
    """An operator of `dsl-backend bench`, with regular expressions for the rows that `dsl-backend verify` times.

    Attributes:
        quick: for one or two of them.
    """

    op: str
    rows: str
    quick: str


@dataclass(frozen=True)
class Check:
    """Kernels that `dsl-backend verify` checks with the same problems.

    Attributes:
        operation: its name in the dispatch tables.
        benchmarks: what is timed.
        layers: specs of layers like those of the problems, where an operation has several such groups: a kernel that
            serves none of them has nothing to check. None is the family's typical layers.
        by_name: kernels that are checked too, though dispatch takes them by name alone.
    """

    operation: str
    benchmarks: tuple[Benchmark, ...] = ()
    layers: Callable[[Target], Sequence[Any]] | None = None
    by_name: tuple[str, ...] = ()


def no_layers(target: Target) -> Mapping[str, Any]:
    return {}


def nothing_unserved(model: ModelShape, target: Target) -> dict[str, list[str]]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """An operator family.

    Attributes:
        tables: operation -> its kernels, best first.
        optional: operations that are another's where no kernel serves them, which is no problem.
        naming_options: operation -> the plugin's option that names a kernel of it.
        serving_options: operation -> the plugin's option that says whose kernels serve it.
        typical_layers: name -> spec of layers as published models have them, for `dsl-backend doctor`.
        operations_of: the operations that a layer needs.
        precompile_specs: the CuTe DSL kernels that a model needs.
        warm_up: whether vLLM's warm-up compiles them. Not where a layer or the sampler has its own compiled, and not
            where vLLM calls none.
        served_by_others: layer of a model -> why CuTe DSL kernels do not serve it.
        tuned_configs: of the kinds of its kernels that are tuned; their names are in `families.TUNED`.
        checks: name for `dsl-backend verify --families` -> what is checked and timed.
    """

    name: str
    precompile_specs: Callable[[ModelShape, Target], Iterable[PrecompileSpec]]
    warm_up: bool = True
    tables: Mapping[str, Sequence[Entry[Any]]] = field(default_factory=dict)
    optional: Sequence[str] = ()
    naming_options: Mapping[str, str] = field(default_factory=dict)
    serving_options: Mapping[str, str] = field(default_factory=dict)
    typical_layers: Callable[[Target], Mapping[str, Any]] = no_layers
    operations_of: Callable[[Any], Sequence[str]] = field(default=lambda spec: ())
    served_by_others: Callable[[ModelShape, Target], Mapping[str, Sequence[str]]] = nothing_unserved
    tuned_configs: Sequence[TunedConfigs[Any]] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)


def load(name: str) -> Family:
    """The family of a name. Raises InvalidInput: there is none."""
    if name not in NAMES:
        raise InvalidInput(f"family {name!r} is not one of {', '.join(NAMES)}")
    family: Family = importlib.import_module(f"dsl_backend.{name}.family").FAMILY
    return family


def load_all() -> tuple[Family, ...]:
    return tuple(load(name) for name in NAMES)


def chosen(only: Sequence[str] = ()) -> list[Family]:
    """The families of these names; all where none are given. Raises InvalidInput: there is no such family."""
    known = {family.name: family for family in load_all()}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise InvalidInput(f"family {unknown[0]!r} is not one of {', '.join(known)}")
    return [known[name] for name in only or known]


def precompile_specs(model: ModelShape, target: Target, only: Sequence[str] = ()) -> list[PrecompileSpec]:
    """All CuTe DSL kernels that a model needs on a target, each once.

    Args:
        only: of these families; by default of all.

    Raises:
        InvalidInput: there is no such family.
    """
    found = (spec for family in chosen(only) for spec in family.precompile_specs(model, target))
    return list({str(spec): spec for spec in found}.values())


def served_by_others(family: Family, model: ModelShape, target: Target) -> list[str]:
    """Why CuTe DSL kernels of a family do not serve all of a model: `layers: reason`, each reason once."""
    found = family.served_by_others(model, target)
    return [f"{'; '.join(parts)}: {reason}" for reason, parts in by_reason(found).items()]
