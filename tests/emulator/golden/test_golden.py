# SPDX-License-Identifier: Apache-2.0
"""Micro-kernels on the emulator against what an H200 answered to them.

The answers are golden_sm90.npz, which make.py makes on a chip. A failed test names the instruction and the first
element that differs; report.py lists all differences, those that a rule allows too, and says what to do with one.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import make
import micro
import numpy as np
import pytest
from micro import FILE, Golden, cases
from micro_case import HEADER, Bits, Close, Result, Rule, Sum
from micro_check import Mismatch, check, own_answer
from micro_compare import compare, compare_case
from micro_emulate import emulate, encode, tensor_map

from emulator.host.tensor_map import decode
from emulator.machine.findings import Kind
from emulator.ptx.forms import arithmetic, asynchronous, conversion, matrix, memory, synchronization
from emulator.ptx.parser import parse

NO_FILE = f"{FILE.name} is missing: make.py makes it on a GPU of SM90"
needs_file = pytest.mark.skipif(not FILE.exists(), reason=NO_FILE)


@lru_cache(maxsize=1)
def golden() -> Golden:
    return Golden.load()


# Kernels that were written after the file was made: the next run of make.py answers them.
AWAITED: list[str] = []


@needs_file
@pytest.mark.parametrize("name", [name for name in cases() if name not in AWAITED] if FILE.exists() else ["all"])
def test_as_the_chip(name: str) -> None:
    check(cases()[name], golden())


@needs_file
def test_it_is_a_chips_file() -> None:
    assert "H200" in golden().source or "H100" in golden().source
    assert set(cases()) - set(golden().outputs) - set(golden().errors) == set(AWAITED)


@needs_file
@pytest.mark.parametrize("name", [name for name, case in cases().items() if case.maps and "question/" not in name])
def test_the_drivers_tensor_maps(name: str) -> None:
    """The emulator reads from the driver's 128 bytes what the driver was asked for."""
    for one, (address, data) in zip(cases()[name].maps, golden().maps[name], strict=True):
        assert decode(data) == tensor_map(one, address)


# What holds without a chip.


def test_maps_are_encoded_as_they_are_read() -> None:
    maps = {one for case in cases().values() for one in case.maps}
    assert len(maps) > 50
    for one in maps:
        wanted = tensor_map(one, 0x7F0000001000)
        assert decode(encode(wanted)) == wanted


@pytest.mark.parametrize("family", sorted({name.partition("/")[0] for name in cases()} - {"question"}))
def test_a_kernel_of_each_family_is_clean(family: str) -> None:
    """On the emulator, without a finding; and its results are not what was there before."""
    of_family = [case for name, case in cases().items() if name.startswith(f"{family}/")]
    for case in (of_family[0], of_family[-1]):
        out, _ = own_answer(case)
        assert (out != case.output()).any()


def test_questions_are_refused() -> None:
    questions = [case for name, case in cases().items() if name.startswith("question/")]
    assert questions
    for case in questions:
        _, machine = emulate(case)
        assert [finding.kind for finding in machine.findings.errors] == [Kind.COPY]


# Rows of the tables that are not asked of a chip of SM90: a later one has them, or their results are no values.
NOT_ASKED = {
    "add#packed|sub#packed|mul#packed|fma#packed": "f32x2 is sm_100's",
    "add#mixed|sub#mixed|fma#mixed": "mixed precision is sm_100's",
    "cvt#pack2rs|cvt#pack4|cvt#pack2f4": "stochastic rounding and e2m1 are sm_100's",
    "prefetch.*|cp.async.bulk.prefetch.*|applypriority|discard|createpolicy.*": "about caches alone",
    "isspacep|cvta#to|movmatrix|cvta": "addresses are the device's own",
    "clusterlaunchcontrol.*|tcgen05.*": "sm_100's",
    "ld#nc": "as ld",
    "griddepcontrol.*|membar.*|fence.*|bar.arrive|barrier.arrive|barrier.sync": "order, no values",
    "bar.cta.*|barrier.cta.*": "other names of bar and barrier",
    "mbarrier.try_wait": "asks what mbarrier.test_wait does",
    "cp.async.wait_all": "as cp.async.wait_group",
}


def test_every_form_is_asked() -> None:
    """The rows of the tables are in some kernel, or in NOT_ASKED with the reason."""
    tables = (arithmetic, asynchronous, conversion, matrix, memory, synchronization)
    wanted = {form.id for one in tables for form in one.FORMS}
    asked = set()
    for case in cases().values():
        module = parse(HEADER + case.text())
        asked |= {instr.op.form.id for instr in module.entries[case.entry].code or ()}
    missing = {one for one in wanted - asked if not any(re.fullmatch(pattern, one) for pattern in NOT_ASKED)}
    assert not missing, sorted(missing)
    needless = [pattern for pattern in NOT_ASKED if not any(re.fullmatch(pattern, one) for one in wanted - asked)]
    assert not needless


def result(rule: Rule, values: np.ndarray, label: str = "") -> Result:
    return Result(label, values, rule)


def raw(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(values.tobytes(), np.uint8)


def test_the_rules_find_what_they_should() -> None:
    ones = np.ones(8, np.float32)
    other = ones.copy()
    other[3] = np.nextafter(np.float32(1), np.float32(2))
    assert compare(result(Bits(), ones), raw(ones), raw(other)).wrong == 1
    nans = ones.view(np.uint32).copy(), ones.view(np.uint32).copy()
    nans[0][2], nans[1][2] = 0x7FFFFFFF, 0xFFC00001
    assert compare(result(Bits(), ones), raw(nans[0]), raw(nans[1])).wrong == 1
    assert compare(result(Bits("f32"), ones), raw(nans[0]), raw(nans[1])).wrong == 0
    assert compare(result(Bits("f32"), ones), raw(nans[0]), raw(ones)).wrong == 1
    close = Close("f32", 2**-20, "")
    for error, wrong in ((2**-20, 0), (2**-18, 1), (np.nan, 1), (np.inf, 1)):
        other[3] = np.float32(1 + error)
        assert compare(result(close, ones), raw(other), raw(ones)).wrong == wrong
    zeros = np.zeros(8, np.float32)
    assert compare(result(close, zeros), raw(-zeros), raw(zeros)).wrong == 8
    largest = np.full(8, np.finfo(np.float32).max)
    assert compare(result(close, largest), raw(np.full(8, np.inf, np.float32)), raw(largest)).wrong == 0
    tiny = np.full(8, 2.0**-126, np.float32)
    assert compare(result(close, tiny, "ex2.approx.ftz.f32"), raw(zeros), raw(tiny)).wrong == 0
    assert compare(result(close, tiny, "ex2.approx.f32"), raw(zeros), raw(tiny)).wrong == 8
    # 17 terms of 2^-23 of magnitudes of 64.
    added = Sum("f32", 17, 23)
    for error, wrong in ((2**-13, 0), (2**-12, 1)):
        other[:] = 1
        other[3] += np.float32(error)
        assert compare(result(added, ones), raw(other), raw(ones), raw(64 * ones)).wrong == wrong


def test_a_changed_answer_is_found() -> None:
    """Of an exact case, of an approximate one and of a sum."""
    for name in ("integer/u16_u16/0", "approximate/angle/0", "wgmma/m64n16k16_f32_f16_f16_ss_sw128_128_t00_pp_wide"):
        case = cases()[name]
        own, magnitude = own_answer(case)
        kept = Golden("H200", {name: own.copy()}, {name: case.digest()})
        assert all(not one.unequal for one in check(case, kept))
        kept.outputs[name][3] ^= 0x40  # of the upper bits of the first element, or of the second
        with pytest.raises(Mismatch, match="element"):
            check(case, kept)
        assert sum(one.wrong for one in compare_case(case, kept.outputs[name], own, magnitude)) == 1
        with pytest.raises(Mismatch, match="has changed"):
            check(replace(case, body=case.body + "\n"), kept)


def test_a_file_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = replace(cases()["mbarrier/arrive"], name="mbarrier/refused", body="pmevent 1;")
    monkeypatch.setattr(make, "cases", lambda: {**cases(), refused.name: refused})
    made = make.on_emulator(["cp_async/0", "tensor/load_1d", refused.name])
    made.maps["tensor/load_1d"] = [(4096, bytes(range(128)))]
    made.save(tmp_path / "some.npz")
    again = Golden.load(tmp_path / "some.npz")
    assert again.digests == made.digests
    assert again.maps == made.maps
    assert list(again.errors) == [refused.name]
    assert all((again.outputs[name] == out).all() for name, out in made.outputs.items())
    assert micro.cases()["cp_async/0"].digest() == again.digests["cp_async/0"]


def test_faults_and_hangs_of_a_chip(tmp_path: Path) -> None:
    """With a library in the driver's place: a kernel that is not compiled, one that faults, one that hangs."""
    source, library = Path(__file__).with_name("fake_cuda.c"), tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "GOLDEN_QUIET": "1", "GOLDEN_COMPILING": "20"}
    script = Path(__file__).with_name("make.py")
    command = [sys.executable, str(script), str(tmp_path), "--only", "async|multicast"]
    subprocess.run(command, env=environment, check=True, timeout=120)
    made = Golden.load(tmp_path / "golden_sm90.npz")
    assert made.source == "no chip, CUDA driver 13000"
    assert {name: words.split(":")[0] for name, words in made.errors.items()} == {
        "cp_async/1": "cuModuleLoadDataEx",
        "cp_async/2": "cuCtxSynchronize",
        "cp_async/3": "hung",
    }
    wanted = [name for name in cases() if re.search("async|multicast", name) and name not in made.errors]
    assert sorted(made.outputs) == sorted(wanted)
    for name, out in made.outputs.items():
        before = cases()[name].output()
        before[0] += 1
        assert (out == before).all(), name
    ((address, data),) = made.maps["tensor/multicast"]
    assert int.from_bytes(data[:8], "little") == address
