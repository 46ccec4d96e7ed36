# SPDX-License-Identifier: Apache-2.0
"""Show that a change leaves the kernels' code as it was: PTX and host code of two checkouts, compared up to names.

    python tools/compare_ptx.py collect OLD    in the one checkout
    python tools/compare_ptx.py collect NEW    in the other one
    python tools/compare_ptx.py compare OLD NEW

`collect` compiles CuTe DSL kernels of all operators for SM90 and SM100, for which no GPU is needed; `--quick` compiles
few of them. What it calls of the package stands in `Package` alone. A kernel is known by its layer, in the words of
this file, and by its place among the layer's kernels, so that a name that changes in the package changes no kernel's.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

Build = Callable[[], Any]
ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm_90a", "sm_100a")
INDEX = "index.json"
# Between PTX and host code.
MARK = "==== host code ===="
HOST = f"\n{MARK}\n"
# Lines of a difference that are printed.
SHOWN = 12


@dataclass(frozen=True)
class Layer:
    """Some kernels that are compared.

    Attributes:
        operator: `Package` has a function of this name.
        words: its name, and what it is.
        facts: arguments of that function.
        quick: whether `--quick` compiles its kernels.
        archs: that have such kernels.
    """

    operator: str
    words: str
    facts: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    archs: tuple[str, ...] = ARCHS

    def name(self, arch: str) -> str:
        return f"{arch} {self.operator} {self.words}"


def dense(words: str, heads: tuple[int, int], dim: int, *, quick: bool = False, **facts: Any) -> Layer:
    return Layer("attention", words, {"heads": heads, "dims": (dim, dim), **facts}, quick)


def latent(words: str, heads: int, dims: tuple[int, int] = (576, 512), *, quick: bool = False, **facts: Any) -> Layer:
    return Layer("attention", words, {"heads": (heads, 1), "dims": dims, "page": 64, "mla": True, **facts}, quick)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
WIDE = {"heads": (16, 16), "dims": (192, 128), "page": None, "lse": True}
LAYERS = (
    dense("heads of 64", (64, 8), 64),
    dense("heads of 80", (32, 8), 80),
    dense("heads of 96", (32, 8), 96),
    dense("heads of 128", (32, 8), 128, quick=True),
    dense("heads of 128, one key head each, lse", (32, 32), 128, lse=True),
    dense("heads of 128, group of 7", (28, 4), 128, dtype="float16"),
    dense("heads of 128, packed", (32, 8), 128, page=None),
    dense("heads of 256", (16, 2), 256),
    dense("heads of 512", (16, 2), 512),
    Layer("attention", "heads of 192 and 128, packed", WIDE),
    Layer("attention", "heads of 192 and 128, packed, all keys", {**WIDE, "causality": "full"}),
    dense("window, softcap and sinks", (32, 8), 128, dtype="float16", window=(99, None), softcap=5.0, sinks="float16"),
    dense("window of two sides, sinks in float32", (64, 8), 64, window=(99, 7), sinks="float32"),
    dense("slopes, all keys", (32, 32), 128, alibi=True, causality="full"),
    dense("causality by request", (32, 8), 64, causality="per_request"),
    dense("scale below 0", (32, 8), 128, scale=-0.1),
    dense("e4m3, heads of 64", (64, 8), 64, stored=E4M3),
    dense("e4m3, heads of 128", (32, 8), 128, stored=E4M3, quick=True),
    dense("e4m3, heads of 256", (16, 2), 256, stored=E4M3),
    dense("e5m2, heads of 128", (32, 8), 128, stored=E5M2, dtype="float16"),
    dense("invariant, heads of 64", (64, 8), 64, invariant=True),
    dense("invariant, heads of 128", (32, 8), 128, invariant=True, quick=True),
    dense("invariant, heads of 256", (16, 2), 256, invariant=True),
    dense("invariant, e4m3, heads of 128", (32, 8), 128, stored=E4M3, invariant=True),
    Layer("attention", "invariant, heads of 192 and 128, packed", {**WIDE, "invariant": True}),
    latent("latent, 16 heads", 16, lse=True, quick=True),
    latent("latent, 128 heads", 128, lse=True, quick=True),
    latent("latent, 64 heads of 320 and 256, without lse", 64, (320, 256)),
    latent("latent, 256 heads of 288 and 256", 256, (288, 256), dtype="float16"),
    latent("latent, e4m3, 16 heads", 16, lse=True, stored=E4M3),
    latent("latent, e4m3, 128 heads", 128, lse=True, stored=E4M3),
    latent("latent, e5m2, 128 heads", 128, stored=E5M2),
    latent("latent, invariant, 128 heads", 128, invariant=True),
    Layer("experts", "swiglu", {}, archs=("sm_90a",)),
    Layer("experts", "gpt-oss", {"gpt_oss": True}, archs=("sm_90a",)),
    Layer("linear", "product", {}),
    Layer("linear", "swiglu", {"activation": "swiglu", "every": 9}, quick=True),
    Layer("linear", "swiglu, bias, residual", {"activation": "swiglu", "added": True, "every": 4}),
    Layer("linear", "clamped swiglu, interleaved", {"activation": "oai", "added": True, "every": 6}),
    Layer("linear", "geglu, bias, residual", {"activation": "geglu", "added": True, "every": 6}),
    Layer("linear", "geglu of tanh, float16", {"activation": "tanh", "dtype": "float16", "every": 6}),
    Layer("linear", "invariant", {"activation": "swiglu", "invariant": True}),
    Layer("scaled", "blocks", {"every": 3}),
    Layer("scaled", "blocks, swiglu, quantised", {"gated": True, "every": 3}, quick=True, archs=("sm_90a",)),
    Layer("scaled", "channels", {"blocks": False, "every": 3}),
    Layer("scaled", "channels, swiglu, quantised", {"blocks": False, "gated": True, "every": 5}),
    Layer("norm", "residual", {}),
    Layer("norm", "residual, e4m3, a scale for each row", {"scaling": "token"}, quick=True),
    Layer("norm", "odd short rows of float16, e4m3", {"dtype": "float16", "width": 1001, "scaling": "tensor"}),
    Layer("norm", "long rows of float32, 1 + weight", {"dtype": "float32", "width": 65536, "weight_offset": 1.0}),
    Layer("sampling", "float32", {"dtype": "float32"}),
    Layer("sampling", "bfloat16", {"dtype": "bfloat16"}, quick=True),
    Layer("sampling", "odd float16", {"dtype": "float16", "vocab": 50257, "tokens": "int32", "top_k": "int64"}),
    Layer("softmax", "float32", {"dtype": "float32"}),
    Layer("softmax", "bfloat16 to float32, log", {"dtype": "bfloat16", "out": "float32", "log": True}, quick=True),
    Layer("softmax", "short rows", {"dtype": "bfloat16", "width": 1000}),
    Layer("softmax", "odd short rows, log", {"dtype": "float16", "width": 1001, "vector": 1, "log": True}),
    Layer("softmax", "rows as long as a tile", {"dtype": "float32", "width": 4096}),
)


class Package:
    """All that is called of the package: for a layer, functions that compile a kernel each."""

    def __init__(self, arch: str) -> None:
        from dsl_backend.runtime.target import from_arch

        self.target = from_arch(arch)

    def attention(
        self,
        *,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: str = "bfloat16",
        stored: str | None = None,
        page: int | None = 16,
        scale: float = 0.1,
        causality: str = "causal",
        window: tuple[int | None, int | None] = (None, None),
        sinks: str | None = None,
        invariant: bool = False,
        lse: bool = False,
        **others: Any,
    ) -> Iterator[Build]:
        """For short and for long queries, also with cluster launch control, and for writes."""
        import torch

        from dsl_backend.attention.precompile import precompile_specs_of
        from dsl_backend.attention.spec import AttentionSpec, Causality

        spec = AttentionSpec(
            heads_q=heads[0],
            heads_kv=heads[1],
            head_dim=dims[0],
            head_dim_v=dims[1],
            dtype=getattr(torch, dtype),
            kv_dtype=getattr(torch, stored or dtype),
            page_size=page,
            scale=scale,
            causality=Causality(causality),
            window_left=window[0],
            window_right=window[1],
            sinks=sinks is not None,
            batch_invariant=invariant,
            **others,
        )
        units = list(precompile_specs_of(spec, self.target, lse=lse, sinks=getattr(torch, sinks) if sinks else None))
        for unit in (*units, *self.launched(spec, units)):
            yield unit.compile

    def launched(self, spec: Any, units: Iterable[Any]) -> Iterator[Any]:
        """The kernels of SM100 for long queries with cluster launch control, which no default has."""
        from dataclasses import replace

        from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig

        for unit in units:
            config = getattr(unit.key, "config", None)
            if isinstance(config, DenseConfig) and not unit.key.split:
                controlled = replace(config, use_clc=True)
                if not controlled.objections(spec, self.target.smem_bytes):
                    yield replace(unit, key=replace(unit.key, config=controlled))

    def experts(self, *, gpt_oss: bool = False) -> Iterator[Build]:
        """For any number of tokens."""
        import torch

        from dsl_backend.experts.precompile import precompile_specs_of
        from dsl_backend.experts.spec import ExpertsSpec
        from dsl_backend.gemm.activation import SWIGLU_OAI, Swiglu

        spec = ExpertsSpec(
            num_experts=32,
            hidden_size=2880,
            intermediate_size=2880,
            topk=4,
            dtype=torch.bfloat16,
            activation=SWIGLU_OAI if gpt_oss else Swiglu(),
            interleaved=gpt_oss,
            w13_bias=gpt_oss,
            w2_bias=gpt_oss,
        )
        for unit in precompile_specs_of(spec, self.target):
            yield unit.compile

    def linear(
        self,
        *,
        activation: str | None = None,
        added: bool = False,
        invariant: bool = False,
        dtype: str = "bfloat16",
        every: int = 1,
    ) -> Iterator[Build]:
        """Every so many of the tiles that fit; of an invariant layer, its kernel."""
        import torch

        from dsl_backend.gemm import host
        from dsl_backend.gemm.activation import SWIGLU_OAI, Geglu, Swiglu
        from dsl_backend.gemm.configs import fitting
        from dsl_backend.gemm.spec import Dtypes
        from dsl_backend.linear.spec import LinearSpec
        from dsl_backend.linear.tuned import configs_of

        kinds = {None: None, "swiglu": Swiglu(), "oai": SWIGLU_OAI, "geglu": Geglu(), "tanh": Geglu(tanh=True)}
        spec = LinearSpec(
            n=4096,
            k=4096,
            dtypes=Dtypes.of(getattr(torch, dtype)),
            activation=kinds[activation],
            interleaved=activation == "oai",
            bias=added,
            residual=added,
            batch_invariant=invariant,
        )
        configs = configs_of(spec, self.target) if invariant else fitting(spec, self.target)[::every]
        for config in configs:
            yield partial(host.build, host.key_of(spec, config), self.target)

    def scaled(self, *, blocks: bool = True, gated: bool = False, every: int = 1) -> Iterator[Build]:
        """Every so many of the tiles that fit a layer of e4m3, and the kernel that quantises beside them."""
        from dsl_backend.gemm.activation import Swiglu
        from dsl_backend.linear.scaled.cute.host import choices, precompile_spec
        from dsl_backend.linear.scaled.spec import ScaledLinearSpec
        from dsl_backend.quant.cute import host as quantising
        from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, ROW_SCALED

        x = GROUP_SCALED if blocks else ROW_SCALED
        spec = ScaledLinearSpec(
            n=4096,
            k=4096,
            x=x,
            weight=BLOCK_SCALED if blocks else ROW_SCALED,
            activation=Swiglu() if gated else None,
            out=x if gated else None,
            column_major=blocks,
        )
        for choice in choices(spec, self.target)[::every]:
            yield precompile_spec(choice, self.target).compile
        if gated and not self.target.tcgen05:
            yield partial(quantising.build, x, self.target)

    def norm(
        self, *, dtype: str = "bfloat16", width: int = 4096, scaling: str = "none", weight_offset: float = 0.0
    ) -> Iterator[Build]:
        import math

        import torch

        from dsl_backend.norm.cute import host
        from dsl_backend.norm.spec import FP8, NormSpec, Scaling
        from dsl_backend.norm.tuned import config_of

        numbers = getattr(torch, dtype)
        spec = NormSpec(
            width=width,
            dtype=numbers,
            out_dtype=numbers if scaling == "none" else FP8,
            weight_dtype=numbers,
            residual=True,
            weight_offset=weight_offset,
            scaling=Scaling(scaling),
            vector=math.gcd(8, width),
        )
        yield partial(host.build, host.key_of(spec, config_of(spec, self.target)), self.target)

    def sampling(
        self, *, dtype: str, vocab: int = 128256, tokens: str = "int64", top_k: str = "int32"
    ) -> Iterator[Build]:
        """For any number of rows."""
        import torch

        from dsl_backend.sampling.configs import cluster_configs, widest_vector
        from dsl_backend.sampling.cute import host
        from dsl_backend.sampling.spec import SamplingSpec

        spec = SamplingSpec(vocab=vocab, dtype=getattr(torch, dtype), token_dtype=getattr(torch, tokens))
        for config in cluster_configs(spec, self.target, 1024, widest_vector(spec)):
            yield partial(host.build, host.key_of(spec, config, getattr(torch, top_k)), self.target)

    def softmax(
        self, *, dtype: str, out: str | None = None, width: int = 128256, log: bool = False, vector: int = 8
    ) -> Iterator[Build]:
        import torch

        from dsl_backend.softmax.cute import host
        from dsl_backend.softmax.spec import SoftmaxSpec
        from dsl_backend.softmax.tuned import config_of

        types = {"dtype": getattr(torch, dtype), "out_dtype": getattr(torch, out or dtype)}
        spec = SoftmaxSpec(width=width, log=log, vector=vector, **types)
        yield partial(host.build, host.key_of(spec, config_of(spec, self.target)), self.target)


@dataclass(frozen=True)
class Asked:
    """Which kernels to compile: of all layers, or of few, and of those whose names hold the words."""

    quick: bool = False
    words: str = ""


def kernels(asked: Asked) -> Iterator[tuple[str, list[Build]]]:
    """(layer, its kernels)."""
    for arch in ARCHS:
        package = Package(arch)
        for layer in LAYERS:
            wanted = arch in layer.archs and (layer.quick or not asked.quick)
            if wanted and asked.words in layer.name(arch):
                yield layer.name(arch), list(getattr(package, layer.operator)(**layer.facts))


class Compiled(Exception):
    """There is PTX: what comes after it in a compilation is left out."""


@contextmanager
def ptx_alone(folder: Path) -> Iterator[None]:
    """Within, a compilation by CuTe DSL ends with `Compiled` when its PTX is in the folder.

    CuTe DSL reads its settings when it is imported.
    """
    assert "cutlass" not in sys.modules, "CuTe DSL is imported already"
    os.environ.update(CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(folder), CUTE_DSL_DISABLE_FILE_CACHING="1")
    from cutlass.base_dsl.compiler import Compiler

    compile_module = Compiler.compile

    def stop_behind(compiler: Any, module: Any, *arguments: Any, **named: Any) -> None:
        host = host_code(module)
        compile_module(compiler, module, *arguments, **named)
        compilations.append(host)
        raise Compiled

    with mock.patch.object(Compiler, "compile", stop_behind):
        yield


# Host code of those that have ended: CuTe DSL wraps what ends them in errors of its own.
compilations: list[str] = []


def host_code(module: Any) -> str:
    """What launches kernels, as MLIR: their grids, shared memory and tensor maps are nowhere in PTX."""
    return "\n".join(str(part) for part in module.body.operations if part.operation.name == "func.func")


def code_of(build: Build, folder: Path) -> str:
    """The PTX that a function compiles, and its host code."""
    for old in folder.glob("*"):
        old.unlink()
    compilations.clear()
    try:
        build()
    except Exception:
        if not compilations:
            raise
    (file,) = folder.glob("*.ptx")
    return file.read_text() + HOST + compilations[0]


def collect(out: Path, wanted: Asked) -> int:
    """Compile the kernels, and keep their PTX; 1 where one does not compile."""
    out.mkdir(parents=True, exist_ok=True)
    # Beside this file, whatever checkout is installed.
    sys.path.insert(0, str(ROOT))
    began, failed, done = time.monotonic(), 0, 0
    index: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="compare-ptx-") as folder, ptx_alone(Path(folder)):
        layers = dict(kernels(wanted))
        total = sum(map(len, layers.values()))
        say(f"{total} kernels of {ROOT}")
        for layer, builds in layers.items():
            index[layer] = []
            for place, build in enumerate(builds):
                done += 1
                try:
                    index[layer].append(keep(out, code_of(build, Path(folder))))
                except Exception as error:  # CuTe DSL has many
                    failed += 1
                    say(f"{layer} {place} does not compile: {error}")
                say(f"{done} of {total}, {time.monotonic() - began:.0f} s: {layer} {place}")
    (out / INDEX).write_text(json.dumps(index, indent=1))
    say(f"{total - failed} kernels are in {out}, {failed} did not compile")
    return 1 if failed else 0


def keep(out: Path, code: str) -> str:
    """The file in which it is kept, named by its digest."""
    name = f"{hashlib.sha256(code.encode()).hexdigest()[:32]}.gz"
    (out / name).write_bytes(gzip.compress(code.encode(), mtime=0))
    return name


COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# What says from which lines of which files the code comes.
SOURCES = re.compile(r"^\s*\.(?:loc|file)\b[^\n]*|^\s*\.section\s+\.debug\w*\s*\{.*?\}", re.MULTILINE | re.DOTALL)
NAME = r"[A-Za-z_$][\w$]*"
DECLARED = re.compile(
    rf"\.(?:entry|func)\b\s*(?:\([^)]*\)\s*)?({NAME})"
    rf"|(?<!\w)\.(?:param|shared|global|const|local)\b(?:\s+\.(?:align\s+\d+|\w+))*\s+({NAME})"
    rf"|\.reg\s+\.\w+\s+({NAME}(?:\s*,\s*{NAME})*)\s*;"
    rf"|^\s*({NAME}):",
    re.MULTILINE,
)
# Not those of generated registers (%r1), of special ones (%tid.x) and of directives.
WORD = re.compile(rf"(?<![\w$.%]){NAME}")
BRACES = re.compile(r"[{}]")


# Of functions, in MLIR and in what it prints.
SYMBOL = re.compile(r"@[\w$.]+")


def normalised(code: str) -> str:
    """PTX and host code with numbers for declared names, and without comments and what tells of sources."""
    ptx, _, host = code.partition(HOST)
    text = renamed(SOURCES.sub("", COMMENT.sub("", ptx)))
    symbols: dict[str, str] = {}
    host = SYMBOL.sub(lambda symbol: symbols.setdefault(symbol[0], f"@name_{len(symbols)}"), host)
    lines = (" ".join(line.split()) for line in (text + HOST + host).splitlines())
    return "\n".join(line for line in lines if line)


def renamed(text: str, depth: int = 0) -> str:
    """A block, or all of the text, with numbers for the names that are declared in it, in their order.

    Blocks of inline assembly have names of their own: those within come first, and hide the names around them.
    """
    parts, own = [], []
    for outside, part in blocks(text):
        parts.append(part if outside else f"{{{renamed(part, depth + 1)}}}")
        own.append(part if outside else "{}")
    names: dict[str, str] = {}
    for found in DECLARED.finditer("".join(own)):
        for name in re.findall(NAME, next(filter(None, found.groups()))):
            names.setdefault(name, f"name_{depth}_{len(names)}")
    return WORD.sub(lambda word: names.get(word[0], word[0]), "".join(parts))


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """(whether it is outside of braces, text): outermost blocks without their braces, and what is around them."""
    depth, begin = 0, 0
    for brace in BRACES.finditer(text):
        depth += 1 if brace[0] == "{" else -1
        if depth == (brace[0] == "{"):
            yield depth == 1, text[begin : brace.start()]
            begin = brace.end()
    yield True, text[begin:]


@dataclass
class Comparison:
    """Kernels by what became of them: their names, and the texts of those that differ."""

    identical: int = 0
    different: list[tuple[str, str, str]] = field(default_factory=list)
    only_old: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether there are kernels, and all are identical."""
        return self.identical > 0 and not (self.different or self.only_old or self.only_new)


def compared(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> Comparison:
    """Of layer -> its kernels' normalised code, whose order does not count.

    A layer that only one has was not asked for there, and is left out.
    """
    found = Comparison(left_out=sorted(old.keys() ^ new.keys()))
    for layer in (layer for layer in old if layer in new):
        common = Counter(old[layer]) & Counter(new[layer])
        found.identical += common.total()
        before, after = without(old[layer], common), without(new[layer], common)
        pairs = zip(before, after, strict=False)
        found.different += [(f"{layer} {place}", text, other) for (place, text), (_, other) in pairs]
        found.only_old += [f"{layer} {place}" for place, _ in before[len(after) :]]
        found.only_new += [f"{layer} {place}" for place, _ in after[len(before) :]]
    return found


def without(kernels: Sequence[str], common: Counter[str]) -> list[tuple[int, str]]:
    """(place, text) of those that are not among the common ones."""
    left, found = Counter(common), []
    for place, text in enumerate(kernels):
        if left[text]:
            left[text] -= 1
        else:
            found.append((place, text))
    return found


def compare(old: Path, new: Path, ptx: bool) -> int:
    """Print what differs, in PTX alone or in host code too; 1 where something does, or nothing is compared."""
    found = compared(kept(old, ptx), kept(new, ptx))
    for name, before, after in found.different:
        alone = ", in host code alone" if before.partition(MARK)[0] == after.partition(MARK)[0] else ""
        say(f"different: {name}{alone}")
        for line in difference(before, after):
            say(f"    {line}")
    for folder, names in ((old, found.only_old), (new, found.only_new)):
        for name in names:
            say(f"only in {folder}: {name}")
    if found.left_out:
        say(f"{len(found.left_out)} layers are in one of the folders alone and left out: {found.left_out[0]}, ...")
    say(
        f"{found.identical} identical, {len(found.different)} different, {len(found.only_old)} only in {old}, "
        f"{len(found.only_new)} only in {new}"
    )
    return 0 if found.same else 1


def kept(folder: Path, ptx: bool = False) -> dict[str, list[str]]:
    """Layer -> its kernels' normalised code, or PTX."""
    index: dict[str, list[str]] = json.loads((folder / INDEX).read_text())

    @cache
    def read(name: str) -> str:
        code = gzip.decompress((folder / name).read_bytes()).decode()
        return normalised(code.partition(HOST)[0] if ptx else code)

    return {layer: [read(name) for name in names] for layer, names in index.items()}


def difference(old: str, new: str) -> list[str]:
    """The first lines of it."""
    lines = [
        line
        for line in unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1)
        if not line.startswith(("---", "+++"))
    ]
    more = [f"... {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="compile kernels of this checkout")
    collecting.add_argument("out", type=Path, metavar="OUT", help="folder for their code")
    collecting.add_argument("--quick", action="store_true", help="few kernels of each operator")
    collecting.add_argument("--only", default="", metavar="WORDS", help="layers whose names hold these words")
    comparing = commands.add_parser("compare", help="compare what was collected; exit status 1 where it differs")
    comparing.add_argument("old", type=Path, metavar="OLD")
    comparing.add_argument("new", type=Path, metavar="NEW")
    comparing.add_argument("--ptx", action="store_true", help="PTX alone, and not the host code that launches kernels")
    asked = parser.parse_args(arguments)
    if asked.command == "compare":
        return compare(asked.old, asked.new, asked.ptx)
    return collect(asked.out, Asked(asked.quick, asked.only))


if __name__ == "__main__":
    sys.exit(main())
