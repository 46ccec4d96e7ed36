# SPDX-License-Identifier: Apache-2.0
"""Lines of code of the kernels that the tables compare: without blank lines, comments and docstrings.

What a kernel shares with others of its package (reductions, pipelines, copies) is not counted, nor is the host code
that chooses and launches it.
"""

import ast
import importlib.util
import io
import pathlib
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIND = "code"
HERE = pathlib.Path(__file__).resolve().parent.parent
# Tokens that are not code.
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Source:
    """Files of a kernel.

    Attributes:
        package: an importable package; None for the benchmarks themselves.
        files: relative to the package's folder.
        names: of the functions and classes that count; all code of the files if there are none.
    """

    package: str | None
    files: tuple[str, ...]
    names: tuple[str, ...] = ()


def own(*files: str) -> Source:
    return Source("dsl_backend", files)


def of_launch(name: str) -> Source:
    return Source(None, (f"launch/kernels/{name}_kernel.py",))


NAMES = {"Gluon": "gluon", "Helion": "helion", "TileLang": "tilelang", "cuTile": "cutile"}


def of_rows(operator: str) -> dict[str, Source]:
    """The kernels of an operator of rows in other DSLs, of which RMSNorm has two: one adds a residual."""
    return {column: Source(None, (f"{operator}/kernels/{name}_kernel.py",)) for column, name in NAMES.items()}


def of_tiles(operator: str, functions: Mapping[str, tuple[str, ...]]) -> dict[str, Source]:
    """The functions of an operator's kernels in other DSLs, which have host code beside them.

    Args:
        functions: by column. Linear layers have two kernels in one file: one is gated.
    """
    return {
        column: Source(None, (f"{operator}/kernels/{NAMES[column]}_kernel.py",), names)
        for column, names in functions.items()
    }


PRODUCTS = {
    "Gluon": ("place", "load_tiles", "multiply", "linear"),
    "Helion": ("product", "swiglu"),
    "TileLang": ("product", "swiglu"),
    "cuTile": ("place", "product", "swiglu"),
}
ATTENTION = {"Helion": ("attention",), "TileLang": ("causal",), "cuTile": ("causal",)}
FA4 = ("flash_fwd_sm90", "mask", "softmax")
# Operator -> provider -> what its kernel on SM90 is written in.
SOURCES: dict[str, dict[str, Source]] = {
    "launch": {
        "dsl": of_launch("cute"),
        "CuTe DSL": of_launch("cute"),
        "Triton": of_launch("triton"),
        "Gluon": of_launch("gluon"),
        "Helion": of_launch("helion"),
        "TileLang": of_launch("tilelang"),
        "cuTile": of_launch("cutile"),
        "torch.compile": Source(None, ("launch/providers.py",), ("add_one",)),
    },
    "softmax": {
        "dsl": own("softmax/cute/kernel.py"),
        "Triton": own("softmax/triton/kernel.py"),
        "quack": Source("quack", ("softmax.py",), ("Softmax",)),
        "Liger": Source(
            "liger_kernel",
            ("ops/softmax.py",),
            ("_softmax_single_block_forward_kernel", "_softmax_multi_block_forward_kernel"),
        ),
        **of_rows("softmax"),
    },
    "norm": {
        "dsl": own("norm/cute/kernel.py"),
        "Triton": own("norm/triton/kernel.py"),
        "quack": Source("quack", ("rmsnorm.py",), ("RMSNorm",)),
        "Liger": Source(
            "liger_kernel", ("ops/rms_norm.py",), ("_rms_norm_forward_kernel", "_block_rms_norm_forward_kernel")
        ),
        **of_rows("norm"),
    },
    "linear": {
        "dsl": own("gemm/sm90/gemm.py", "gemm/tiled.py", "gemm/epilogue.py", "gemm/activation.py"),
        "Triton": own("linear/triton/gemm.py", "gemm/triton/tiles.py"),
        "quack": Source("quack", ("gemm_sm90.py", "gemm_default_epi.py")),
        **of_tiles("linear", PRODUCTS),
    },
    "prefill": {
        "dsl": own(
            *(f"attention/cute/sm90/{name}.py" for name in ("dense_kernel", "dense_mma", "speculative_softmax")),
            *(f"attention/cute/{name}.py" for name in ("loader/dense", "mask", "softmax", "rows", "tiles")),
        ),
        "Triton": own("attention/triton/prefill.py", "attention/triton/tiles.py"),
        "TRITON_ATTN": Source("vllm", ("v1/attention/ops/triton_unified_attention.py",)),
        "FA4": Source("vllm", tuple(f"vllm_flash_attn/cute/{file}.py" for file in FA4)),
        **of_tiles("attention", ATTENTION),
    },
}


def folder_of(package: str | None) -> pathlib.Path | None:
    """The folder of a package; None if it is not installed."""
    if package is None:
        return HERE
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return pathlib.Path(next(iter(places))) if places else None


def docstrings(tree: ast.AST) -> Iterator[int]:
    """The numbers of the lines of docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
            continue
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return held - set(docstrings(ast.parse(text)))


def count(text: str, names: Sequence[str] = ()) -> int:
    """Lines of code of a file, or of some functions and classes of it with their decorators.

    Raises:
        ValueError: it has none of such a name.
    """
    lines = code_lines(text)
    if not names:
        return len(lines)
    spans = {
        node.name: range(min([node.lineno, *(one.lineno for one in node.decorator_list)]), (node.end_lineno or 0) + 1)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    if absent := [name for name in names if name not in spans]:
        raise ValueError(f"there is no {', '.join(absent)}")
    return sum(line in lines for name in names for line in spans[name])


def record(operator: str, provider: str, source: Source) -> dict[str, Any]:
    """A line of the JSON: status `ok` with `lines` and `files`, or `skipped` with a message."""
    facts = {"kind": KIND, "operator": operator, "provider": provider, "files": list(source.files)}
    folder = folder_of(source.package)
    if folder is None:
        return {**facts, "status": "skipped", "message": f"{source.package} is not installed"}
    try:
        lines = sum(count((folder / file).read_text(), source.names) for file in source.files)
    except (OSError, SyntaxError, ValueError) as error:
        return {**facts, "status": "skipped", "message": f"this version has other files: {error}"}
    return {**facts, "status": "ok", "lines": lines}


def records(operators: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of all kernels of some operators."""
    return [
        record(operator, provider, source) for operator in operators for provider, source in SOURCES[operator].items()
    ]
