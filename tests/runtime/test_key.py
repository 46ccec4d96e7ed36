# SPDX-License-Identifier: Apache-2.0
"""Keys: equal ones have one text in every process, different ones never."""

import dataclasses
import enum
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import key, toolkit
from dsl_backend.runtime.key import Identity, identify, stable
from dsl_backend.runtime.target import from_arch

pytest.importorskip("cutlass")

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from self_test_kernels import Scale, ScaleKey, fake_args


class Order(enum.Enum):
    ROWS = 1
    COLUMNS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    tile: Any = 1
    inner: Any = None


DIFFERENT = [
    Config(1),
    Config(True),
    Config(1.0),
    Config("1"),
    Config(b"1"),
    Config(None),
    Config(Order.ROWS),
    Config(Order.COLUMNS),
    Config(torch.float16),
    Config(torch.bfloat16),
    Config(cutlass.Float16),
    Config(cutlass.BFloat16),
    Config((1, 2)),
    Config((12,)),
    Config(()),
    Config(((1,), 2)),
    Config(frozenset({1, 2})),
    Config(Config(1)),
    Config(inner=1),
    ScaleKey(),
]


def test_different_keys_have_different_texts() -> None:
    texts = [stable(one) for one in DIFFERENT]
    assert len(set(texts)) == len(texts)


def test_sets_have_an_order() -> None:
    names = [f"name {index}" for index in range(50)]
    assert stable(frozenset(names)) == stable(frozenset(reversed(names)))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Config(object()), "key.tile is <object object"),
        (Config([1]), r"key.tile is \[1\] of type list"),
        (Config(({},)), r"key.tile\[0\] is {} of type dict"),
        (Config(inner=Config(len)), "key.inner.tile is <built-in function len>"),
        (Config(float("nan")), "key.tile is nan"),
    ],
)
def test_what_has_no_stable_text_is_refused(value: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        stable(value)


def identity(arch: str = "sm_90a", args: Any = None, options: str = "", **config: Any) -> Identity:
    chosen = ScaleKey(**config)
    return identify(
        Scale(chosen), fake_args(chosen) if args is None else args, key=chosen, target=from_arch(arch), options=options
    )


def test_all_that_matters_is_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [identity(), identity("sm_100a"), identity(threads=64), identity(options="--opt-level 2")]
    size, other = cute.sym_int(), cute.sym_int()

    def fake(dtype: Any, first: Any, second: Any, align: int | None = None) -> Any:
        tensors = (make_fake_compact_tensor(dtype, (count,), assumed_align=align) for count in (first, second))
        return (*tensors, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))

    f32 = cutlass.Float32
    assert identity(args=fake(f32, size, size)) == found[0], "other symbols with the same relation are the same"
    found += [
        identity(args=fake(f32, size, other)),
        identity(args=fake(f32, 64, 64)),
        identity(args=fake(f32, size, size, 16)),
        identity(args=fake(f32, *[cute.sym_int(divisibility=8)] * 2)),
        identity(args=fake(cutlass.Float16, size, size)),
        identity(args=(*fake(f32, size, size)[:3], make_fake_stream())),
        identity(args=[make_fake_tensor(f32, (size,), (cute.sym_int64(),))]),
        identity(args=[(f32, size), Config(size)]),
        identity(args=[(f32, size), Config(other)]),
    ]
    monkeypatch.setattr(toolkit, "versions", lambda: ("nvidia_cutlass_dsl-9.9.9",))
    found.append(identity())
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    found.append(identity())
    monkeypatch.undo()
    monkeypatch.setattr(key, "sources_of", lambda root: key.Sources("other", 0.0))
    found.append(identity())
    digests = [one.digest for one in found]
    assert len(set(digests)) == len(digests)


def test_what_changes_no_code_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/nowhere")
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "10")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert identity() == before


def test_equal_in_every_process() -> None:
    """Addresses and hash seeds differ between processes."""
    code = "import test_key\nprint(test_key.identity().digest)"
    here = Path(__file__).parent
    for seed in ("1", "2"):
        environment = dict(os.environ, PYTHONHASHSEED=seed, PYTHONPATH=f"{here}:{here.parents[1]}")
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == identity().digest


def test_sources_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kernels_of_a_test"
    (package / "sm90").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sm90" / "decode.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    fingerprints = []
    for change in (
        lambda: None,
        lambda: (package / "sm90" / "decode.py").write_text("A = 2\n"),
        (package / "b.py").touch,
        lambda: (package / "b.py").write_text("from dsl_backend.primitives import copy\n"),
    ):
        change()
        key.forget()
        fingerprints.append(key.sources_of("kernels_of_a_test.sm90.decode").fingerprint)
    assert len(set(fingerprints)) == 4, "contents and names both count"
    found = key.followed(key.files_of_root("kernels_of_a_test"))
    assert "dsl_backend.primitives.copy" in found, "what it imports of this package counts too"


DENSE = "dsl_backend.attention.cute.sm90.dense_kernel"
GEMM = "dsl_backend.gemm.sm90.gemm"
Edit = Callable[..., set[str]]


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edit:
    """Edits files of a copy of the package; returns the kernels' modules whose fingerprints change."""
    copied = tmp_path / "dsl_backend"
    shutil.copytree(key.FOLDER, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(key, "FOLDER", copied)

    def fingerprints() -> dict[str, str]:
        key.forget()
        return {module: key.sources_of(module).fingerprint for module in (DENSE, GEMM, key.COMPILER)}

    before = fingerprints()

    def edit(*names: str) -> set[str]:
        for name in names:
            (copied / name).write_text(f"{(copied / name).read_text()}\n# edited\n")
        return {module for module, found in fingerprints().items() if found != before[module]}

    return edit


ELSEWHERE = (
    "cli.py",
    "doctor.py",
    "kernel_commands.py",
    "verify.py",
    "runtime/cache.py",
    "runtime/family.py",
    "attention/dispatch.py",
    "attention/cute/host.py",
    "attention/triton/prefill.py",
    "vllm_plugin/registration.py",
    "testing/cases/case.py",
    "sampling/cute/host.py",
)


def test_edits_elsewhere_recompile_nothing(edited: Edit) -> None:
    assert edited(*ELSEWHERE) == set()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("attention/cute/sm90/dense_kernel.py", {DENSE}),
        ("attention/cute/sm90/dense_configs.py", {DENSE}),
        ("attention/spec.py", {DENSE}),  # indirectly
        ("gemm/sm90/gemm.py", {GEMM}),
        ("gemm/__init__.py", {GEMM}),  # runs where a module of the package is imported
        ("primitives/copy.py", {DENSE, GEMM}),
        ("runtime/toolkit.py", {key.COMPILER}),  # a part of every kernel's identity
    ],
)
def test_an_edit_of_what_a_kernel_imports_recompiles_it(edited: Edit, name: str, changed: set[str]) -> None:
    assert edited(name) == changed


def test_a_module_that_is_gone_is_not_current(edited: Edit) -> None:
    kept = {module: key.sources_of(module).fingerprint for module in (DENSE, GEMM, key.COMPILER)}
    assert key.is_current(kept)
    assert not key.is_current({}), "an entry of an older format says nothing of its sources"
    assert edited("attention/spec.py") == {DENSE}
    assert not key.is_current(kept)
    kept.pop(DENSE)
    assert key.is_current(kept)
    (key.FOLDER / "gemm" / "sm90" / "gemm.py").unlink()
    key.forget()
    assert not key.is_current(kept)


IMPORTS = """
from typing import TYPE_CHECKING
import dsl_backend.checks
from dsl_backend.runtime import cache
from . import tiles
from ..key import Key
if TYPE_CHECKING:
    from dsl_backend import cli
else:
    from dsl_backend import envs
def late():
    from dsl_backend.log import logger
"""


def test_imports(tmp_path: Path) -> None:
    """Inside functions and relative ones as well; not those that only a type checker runs."""
    file = tmp_path / "gemm.py"
    file.write_text(IMPORTS)
    found = key.imports_of(file, "dsl_backend.gemm.sm90.gemm")
    expected = {"checks", "runtime.cache", "gemm.sm90.tiles", "gemm.key", "envs", "log"}
    assert {f"dsl_backend.{name}" for name in expected} <= found
    assert "dsl_backend.cli" not in found
    assert {"dsl_backend", "dsl_backend.gemm", "dsl_backend.gemm.sm90"} <= found, "packages run too"


def test_a_kernel_brings_the_modules_of_its_parts() -> None:
    from dsl_backend.gemm.activation import Swiglu

    kernel = Scale(ScaleKey())
    assert key.parts_of(kernel) == set()
    kernel.activation = Swiglu()
    assert key.parts_of(kernel) == {"dsl_backend.gemm.activation"}


def test_a_key_brings_the_modules_of_its_types() -> None:
    from dsl_backend.gemm.activation import Swiglu

    assert key.modules_of(Config(tile=(Order.ROWS, Swiglu()))) == {__name__, "dsl_backend.gemm.activation"}
    assert (
        "dsl_backend.gemm.activation"
        in json.loads(identify(Scale(ScaleKey()), (), key=Config(Swiglu()), target=from_arch("sm_90a")).text)["sources"]
    )


def test_code_that_is_older_than_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity().reusable
    monkeypatch.setattr(key, "LOADED", 0.0)
    assert not identity().reusable


@pytest.mark.parametrize("wrong", [{"threads": 1}, ("threads", 1), None, ScaleKey])
def test_a_key_is_a_dataclass(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="an instance of a dataclass is needed"):
        identify(Scale(ScaleKey()), (), key=wrong, target=from_arch("sm_90a"))


def test_a_cpu_is_no_target() -> None:
    with pytest.raises(InvalidInput, match="cannot be compiled for target cpu: use an architecture such as sm_90a"):
        identity("cpu")


def test_kernels_need_a_file() -> None:
    with pytest.raises(InvalidInput, match="kernels of sys cannot be compiled: it has no source file"):
        key.sources_of("sys")
