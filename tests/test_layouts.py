# SPDX-License-Identifier: Apache-2.0
"""The layout algebra against its definitions and against CuTe DSL, the pictures, and the answers of docs/layouts.md."""

import random
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dsl_backend import layout_svg, layouts
from dsl_backend.cli import app
from dsl_backend.errors import InvalidInput
from dsl_backend.layouts import Layout, coalesce, complement, composition, logical_divide, logical_product, parse

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/layouts.md").read_text()


def emulated(what: str, layout: str) -> str:
    """What the page's program says of a layout."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    answer: str = runpy.run_path(str(ROOT / "docs/examples/layout_exercises.py"))["answer"](what, layout)
    return answer


def offsets(layout: Layout) -> list[int]:
    return [layout(i) for i in range(layout.size)]


def random_layout(draw: random.Random) -> Layout:
    """An injective layout: the modes of a compact one in another order, some in tuples, with a gap."""
    sizes = [draw.choice((1, 2, 3, 4, 6)) for _ in range(draw.randint(1, 4))]
    order = draw.sample(range(len(sizes)), len(sizes))
    strides, step = [0] * len(sizes), draw.choice((1, 1, 2))
    for place in order:
        strides[place] = step
        step *= sizes[place] * draw.choice((1, 1, 2))
    if len(sizes) > 2 and draw.random() < 0.5:
        return Layout((sizes[0], tuple(sizes[1:])), (strides[0], tuple(strides[1:])))
    return Layout(tuple(sizes), tuple(strides))


class TestAlgebra:
    @pytest.mark.parametrize("seed", range(200))
    def test_definitions(self, seed: int) -> None:
        """Of what each function promises, element by element."""
        draw = random.Random(seed)
        a, b = random_layout(draw), random_layout(draw)
        assert offsets(coalesce(a)) == offsets(a)
        size = a.cosize * draw.randint(1, 3)
        try:
            rest = complement(a, size)
        except InvalidInput:
            pass
        else:
            both = [x + y for x in offsets(a) for y in offsets(rest)]
            assert len(set(both)) == len(both), "no offset twice"
            assert max(both) + 1 >= size
        if b.cosize <= a.size:
            try:
                found = composition(a, b)
            except InvalidInput:
                return
            assert offsets(found) == [a(i) for i in offsets(b)]

    def test_a_division_has_every_element_once(self) -> None:
        found = logical_divide("(8,6):(6,1)", "4:2")
        assert sorted(offsets(found)) == list(range(48))
        assert [found((i, 0)) for i in range(4)] == [parse("(8,6):(6,1)")(2 * i) for i in range(4)]

    def test_a_product_repeats_a_layout(self) -> None:
        found = logical_product("(2,2):(4,1)", "6:1")
        first = [found((i, 0)) for i in range(4)]
        for copy in range(6):
            shift = found((0, copy))
            assert [found((i, copy)) for i in range(4)] == [offset + shift for offset in first]
        assert len(set(offsets(found))) == 24

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: composition("(4,3):(3,1)", "3:2"), "composition: 3:2 ends inside of the mode 4:3"),
            (lambda: composition("(4,3):(3,1)", "2:3"), "composition: a step of 3 does not divide the mode 4:3"),
            (lambda: complement("(2,2):(1,1)", 8), "complement: (2,2):(1,1) has offsets twice"),
            (lambda: complement("4:0", 8), "has offsets twice"),
            (lambda: parse("(2,2):(1,2)")((1, (0, 1))), "coordinate (0,1) has modes where the layout has one of 2"),
            (lambda: parse("(2,2):(1,2)")((1, 0, 1)), "coordinate (1,0,1) has 3 modes, the layout 2"),
        ],
    )
    def test_what_has_no_result(self, call: Callable[[], object], message: str) -> None:
        with pytest.raises(InvalidInput, match=re.escape(message)):
            call()

    def test_cute_dsl_agrees(self) -> None:
        """Layouts that CuTe DSL makes while it traces a kernel, as text."""
        cutlass = pytest.importorskip("cutlass")
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from dsl_backend.runtime import toolkit

        cases = [
            ("((2,4),(2,4)):((1,4),(2,16))", "(4,4):(2,16)"),
            ("20:2", "(5,4):(4,1)"),
            ("(6,8):(8,1)", "(3,4):(2,6)"),
        ]
        seen: list[tuple[str, ...]] = []

        def made(layout: Layout) -> Any:
            return cute.make_layout(layout.shape, stride=layout.stride)

        class Kernel:
            @cute.jit
            def __call__(self, unused: cute.Tensor, stream: Any) -> None:
                for a, b in cases:
                    one, other = made(parse(a)), made(parse(b))
                    divided, whole = cute.logical_divide(one, other), cute.size(one) * cute.cosize(other)
                    found = (cute.composition(one, other), divided, cute.complement(one, whole), cute.coalesce(one))
                    seen.append(tuple(map(str, found)))

        tensor = make_fake_compact_tensor(cutlass.Int32, (32,), assumed_align=4)
        toolkit.compiled(Kernel(), (tensor, make_fake_stream(use_tvm_ffi_env_stream=True)), "sm_90a", "")
        for (a, b), (composed, divided, rest, joined) in zip(cases, seen[: len(cases)], strict=True):
            whole = parse(a).size * parse(b).cosize
            for text, mine in (
                (composed, composition(a, b)),
                (divided, logical_divide(a, b)),
                (rest, complement(a, whole)),
                (joined, coalesce(a)),
            ):
                assert offsets(parse(text)) == offsets(mine), (a, b, text, str(mine))


class TestText:
    @pytest.mark.parametrize(
        "text", ["8:1", "(4,2):(2,1)", "((2,4),(8,2)):((1,8),(2,64))", "Sw<3,3,3> o (8,64):(64,1)"]
    )
    def test_is_read_and_written(self, text: str) -> None:
        assert str(parse(text)) == text
        assert str(parse(f"  {text.replace(',', ' , ')} ")) == text

    def test_without_a_stride(self) -> None:
        assert str(parse("(4,(2,3))")) == "(4,(2,3)):(1,(4,8))"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "the end at 0 where a number or ( is needed"),
            ("(2,4", "the end at 4 where , or ) is needed"),
            ("(2,4)):1", "')' at 5 is not expected behind a whole layout"),
            ("(2;4)", "';' at 2 is no digit, parenthesis, comma or colon"),
            ("(2,,4)", "',' at 3 where a number or ( is needed"),
            ("(2,4):1", "stride 1 is not nested like shape (2,4)"),
            ("(2,(4,2)):(1,(2,1,3))", "stride (1,(2,1,3)) is not nested like shape (2,(4,2))"),
            ("(2,0)", "a shape of 0: at least 1 is needed"),
            ("(2,-4)", "'-' at 3 is no digit"),
            ("4:1:2", "':' at 3 is not expected behind a whole layout"),
            ("Sw<3,4> o 8:1", "a swizzle is written Sw<bits,base,shift> o shape:stride"),
            ("Sw<3,3,1> o 8:1", "a shift of 1 is less than the 3 bits"),
        ],
    )
    def test_what_is_none(self, text: str, message: str) -> None:
        with pytest.raises(InvalidInput, match=re.escape(message)):
            parse(text)


def draw(*words: str) -> Any:
    return CliRunner().invoke(app, ["draw", *words])


class TestDraw:
    def texts(self, picture: str) -> list[str]:
        root = ElementTree.fromstring(picture)
        return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]

    def test_offsets(self, tmp_path: Path) -> None:
        done = draw("(2,3):(3,1)")
        assert done.exit_code == 0
        assert self.texts(done.stdout) == ["(2,3):(3,1)", "0", "1", "2", "0", "0", "1", "2", "1", "3", "4", "5"]
        file = tmp_path / "picture.svg"
        assert draw("(2,3):(3,1)", "--out", str(file)).exit_code == 0
        assert file.read_text() == done.stdout

    def test_owners(self) -> None:
        texts = self.texts(draw("(4,2):(2,1)", "--tile", "2x4").stdout)
        assert [text for text in texts if "T" in text] == [f"T{t} V{v}" for v in range(2) for t in range(4)]

    def test_more_modes_are_more_tables(self) -> None:
        texts = self.texts(draw("(2,2,2):(1,2,4)").stdout)
        assert "(:,:,0)" in texts
        assert "(:,:,1)" in texts
        assert texts[-1] == "7"

    def test_colours_are_of_chunks(self) -> None:
        root = ElementTree.fromstring(draw("16:1", "--chunk", "4").stdout)
        fills = [one.get("fill") for one in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
        assert fills == [layout_svg.COLOURS[i // 4] for i in range(16)]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["(2,4"], "the end at 4 where , or ) is needed"),
            (["(200,200)"], "40000 cells: 8192 are the most that a picture has"),
            (["(2,2)", "--tile", "2"], "tile is '2': rows and columns such as 64x8 are needed"),
            (["4:1", "--tile", "2x2"], "layout 4:1 has 1 modes: a tile needs two, (thread, value)"),
            (["(4,2):(2,1)", "--tile", "2x3"], "thread 3, value 0 is element 6: the tile 2x3 has 6"),
            (["(4,2):(1,1)", "--tile", "2x4"], "thread 1, value 0 and thread 0, value 1 are both element 1"),
            (["8:1", "--chunk", "0"], "chunk is 0: at least 1 is needed"),
            (["8:1", "--out", "/dev/null/file"], "--out /dev/null/file cannot be written: Not a directory"),
        ],
    )
    def test_wrong_use(self, words: list[str], message: str) -> None:
        done = draw(*words)
        assert done.exit_code == 2
        assert message in done.stderr
        assert done.stdout == ""


class TestThePage:
    def test_its_pictures_are_those_of_its_commands(self) -> None:
        commands = re.findall(r'^dsl-backend draw "([^"]+)"((?: --\w+ \S+)*)$', PAGE, re.M)
        shown = set(re.findall(r"\]\((images/layouts/[\w-]+\.svg)\)", PAGE))
        made = set()
        for layout, options in commands:
            words = options.split()
            file = words.pop(words.index("--out") + 1)
            words.remove("--out")
            done = draw(layout, *words)
            assert done.exit_code == 0, done.stderr
            assert (ROOT / "docs" / file).read_text() == done.stdout, f"docs/{file} is not what the command draws"
            made.add(file)
        assert len(made) >= 6
        assert made == shown

    def test_its_answers(self) -> None:
        """The tables of exercises: an expression of this algebra, and what it is."""
        rows = re.findall(r"^\| \d+ \| [^|]* \| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.M)
        assert len(rows) >= 12
        names = {name: getattr(layouts, name) for name in ("coalesce", "complement", "composition", "parse")}
        names |= {"logical_divide": logical_divide, "logical_product": logical_product}
        for expression, answer in rows:
            assert str(eval(expression, names)) == answer, expression

    @pytest.mark.parametrize(("layout", "wavefronts"), re.findall(r"^\| `([^`|]+)` \| \d+ \| (\d+) \|$", PAGE, re.M))
    def test_its_wavefronts(self, layout: str, wavefronts: str) -> None:
        """Of a warp that reads column 0 of 32 rows, 16 bytes a lane, counted by the emulator."""
        assert emulated("column", layout) == f"{wavefronts} wavefronts"

    @pytest.mark.parametrize(
        ("exercise", "answer"), re.findall(r"^\| E\d+ \| [^|]* \| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.M)
    )
    def test_its_answers_on_the_emulator(self, exercise: str, answer: str) -> None:
        what, layout = exercise.split(" ", 1)
        assert emulated(what, layout) == answer

    def test_it_has_exercises_on_the_emulator(self) -> None:
        assert len(re.findall(r"^\| E\d+ \|", PAGE, re.M)) >= 7

    def test_wgmma_accumulators(self) -> None:
        """The layout of the page, and that of the instruction: PTX ISA, wgmma .m64nNk16, matrix D."""
        (text,) = set(re.findall(r"`(\(\(4,8,4\),\(2,2,2\)\):[^`]+)`", PAGE))
        layout = parse(text)
        for thread in range(128):
            for value in range(8):
                row = thread // 32 * 16 + thread % 32 // 4 + value // 2 % 2 * 8
                column = value // 4 * 8 + thread % 4 * 2 + value % 2
                assert layout((thread, value)) == row + 64 * column
