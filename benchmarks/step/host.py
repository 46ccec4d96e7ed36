# SPDX-License-Identifier: Apache-2.0
"""What the host does in steps, by a profile of its Python functions: how much of it is this package's.

A profile makes calls longer, and small ones most. So its shares are taken of a step's time without a profile.
"""

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

OURS = "dsl_backend"
# Directories of site-packages, and this package's, that functions are counted by.
PACKAGES = (OURS, "vllm", "torch", "triton", "cutlass", "tvm_ffi", "numpy")
# A function: (file, line, name). Functions in C have the file "~".
Function = tuple[str, int, str]
# Of pstats: calls without and with recursion, own seconds, seconds with what it calls, and the same by caller.
Entry = tuple[int, int, float, float, Mapping[Function, tuple[int, int, float, float]]]


@dataclass(frozen=True)
class Span:
    """A function of this package.

    Attributes:
        name: `vllm_plugin/metadata.py:build`.
        calls: a step.
        us: a step, its own and that of the functions in C that it calls.
        all_us: a step, with all that it calls.
    """

    name: str
    calls: float
    us: float
    all_us: float


@dataclass(frozen=True)
class Host:
    """What the host does in a step.

    Attributes:
        step_us: without a profile.
        packages: us of a step by package: functions' own time and that of the functions in C that they call.
        calls: of this package's functions, a step.
        entered_us: this package's functions with all that they call: what a step would be shorter without them.
        spans: of this package, the longest own time first.
    """

    step_us: float
    packages: dict[str, float]
    calls: float
    entered_us: float
    spans: tuple[Span, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def package_of(file: str) -> str:
    """The package that a file belongs to; `other` for those that are not told apart."""
    parts = file.replace("\\", "/").split("/")
    return next((name for name in PACKAGES if name in parts), "other")


def name_of(function: Function) -> str:
    """A function of this package as reports name it."""
    file, _, name = function
    return f"{file.replace(chr(92), '/').rpartition(f'/{OURS}/')[2]}:{name}"


def summarized(stats: Mapping[Function, Entry], steps: int, step_us: float) -> Host:
    """What a profile of so many steps says.

    Args:
        stats: of pstats.
        step_us: a step without a profile.

    Raises:
        ValueError: the profile is empty.
    """
    total = sum(entry[2] for entry in stats.values())
    if not total:
        raise ValueError("the profile has no function")
    scale = step_us / total  # from seconds of all profiled steps to us of one
    own: defaultdict[Function, float] = defaultdict(float)
    entered = 0.0
    for function, (_, _, seconds, _, callers) in stats.items():
        if function[0] != "~" or not callers:
            own[function] += seconds
        for caller, (_, _, called, with_all) in callers.items():
            if function[0] == "~":
                own[caller] += called
            elif package_of(function[0]) == OURS != package_of(caller[0]):
                entered += with_all
    packages: defaultdict[str, float] = defaultdict(float)
    for function, seconds in own.items():
        packages[package_of(function[0])] += seconds * scale
    spans = [
        Span(name_of(function), entry[1] / steps, own[function] * scale, entry[3] * scale)
        for function, entry in stats.items()
        if package_of(function[0]) == OURS
    ]
    return Host(
        step_us=step_us,
        packages=dict(sorted(packages.items(), key=lambda item: -item[1])),
        calls=sum(span.calls for span in spans),
        entered_us=entered * scale,
        spans=tuple(sorted(spans, key=lambda span: -span.us)),
    )


def profiled(run: Callable[[int], None], steps: int, step_us: float) -> Host:
    """Profile this thread while it runs so many steps."""
    profile = cProfile.Profile()
    profile.enable()
    run(steps)
    profile.disable()
    return summarized(pstats.Stats(profile).stats, steps, step_us)  # type: ignore[attr-defined]


def rows_of(host: Host, layers: int, most: int) -> list[list[str]]:
    """The rows of a table: packages, this package with all that it calls, then its longest functions."""
    rows = [["host", "calls a step", "us a step", "us a layer"]]
    for name, us in host.packages.items():
        calls = f"{host.calls:.0f}" if name == OURS else ""
        rows.append([name, calls, f"{us:.1f}", f"{us / layers:.2f}"])
    rows.append([f"{OURS} and what it calls", "", f"{host.entered_us:.1f}", f"{host.entered_us / layers:.2f}"])
    rows += [[span.name, f"{span.calls:g}", f"{span.us:.1f}", f"{span.us / layers:.2f}"] for span in host.spans[:most]]
    return rows
