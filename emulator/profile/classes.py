# SPDX-License-Identifier: Apache-2.0
"""What kind of work an instruction is, and which unit of an SM does it.

PTX is not what the chip runs: the assembler fuses, splits and removes instructions. Two kinds of removed ones are so
common that they are classes of their own and cost nothing in the model: moves between registers (packing and unpacking
of wider ones among them), and loads of kernel parameters, which become operands in the constant bank.

Sources: CUDA C++ Programming Guide 12.6, "Arithmetic Instructions", table "Throughput of Native Arithmetic
Instructions", for what an instruction counts; Nsight Compute documentation, "Pipelines", for the units: ALU (integer
and logic without multiplication, comparison, min, max), FMA (FP32, half precision, integer multiplication), XU
(transcendental functions and conversions between integers and floats).
"""

import enum
from dataclasses import dataclass
from functools import lru_cache

from emulator.ptx.grammar import Op


class Class(enum.Enum):
    """Kinds of instructions, in the order of the report."""

    MOVE = "register moves (free)"
    PARAMETER = "parameter loads (free)"
    INTEGER = "integer ALU"
    MULTIPLY = "integer multiply"
    FP32 = "FP32"
    FP32X2 = "FP32 packed (f32x2)"
    HALF = "half precision"
    FP64 = "FP64"
    MUFU = "MUFU"
    CONVERT = "conversions"
    PACK = "conversions of pairs"
    SELECT = "predicate, select, min, max"
    SHUFFLE = "shuffle, vote, warp sync"
    BRANCH = "branch"
    SHARED = "shared memory load, store"
    MATRIX = "ldmatrix, stmatrix"
    GLOBAL = "global load, store"
    LOCAL = "local load, store"
    ATOMIC = "atomics"
    MBARRIER = "mbarrier"
    BARRIER = "barriers, fences"
    TMA = "TMA, bulk copies"
    CP_ASYNC = "cp.async"
    MMA_SYNC = "mma.sync"
    WGMMA = "wgmma"
    TENSOR_MMA = "tcgen05.mma"
    TENSOR_MOVE = "tcgen05.ld, st"
    TENSOR = "tcgen05, other"
    CONTROL = "control"


class Unit(enum.Enum):
    """Parts of an SM with a rate of their own."""

    ISSUE = "issue"
    ALU = "ALU"
    FMA = "FMA"
    XU = "MUFU, conversions"
    FP64 = "FP64"
    SHUFFLE = "shuffle"
    SHARED = "shared memory"
    MMA = "tensor cores"


# Units that each of an SM's four parts has a quarter of; the others serve all warps alike.
PER_PARTITION = frozenset({Unit.ISSUE, Unit.ALU, Unit.FMA, Unit.XU, Unit.FP64})
FREE = frozenset({Class.MOVE, Class.PARAMETER})
WARP = 32

_UNIT = {
    Class.INTEGER: Unit.ALU,
    Class.SELECT: Unit.ALU,
    Class.MULTIPLY: Unit.FMA,
    Class.FP32: Unit.FMA,
    Class.FP32X2: Unit.FMA,
    Class.HALF: Unit.FMA,
    Class.FP64: Unit.FP64,
    Class.MUFU: Unit.XU,
    Class.CONVERT: Unit.XU,
}
# Of opcodes that are of one class whatever their modifiers; an opcode stands for those that begin with it, too.
_FIXED = {
    Class.INTEGER: "sad popc clz bfind fns brev bfe bfi szext bmsk addc subc lop3 prmt cvt.pack isspacep mapa"
    " getctarank mbarrier.pending_count createpolicy cnot",
    Class.MULTIPLY: "mul24 mad24 dp4a dp2a madc",
    Class.SELECT: "testp copysign set setp selp slct",
    Class.MUFU: "sin cos lg2 ex2 tanh",
    Class.SHUFFLE: "shfl vote match activemask redux elect movmatrix bar.warp.sync",
    Class.BRANCH: "bra brx call ret",
    Class.MATRIX: "ldmatrix stmatrix",
    Class.ATOMIC: "atom red",
    Class.MBARRIER: "mbarrier",
    Class.BARRIER: "bar barrier fence membar",
    Class.TMA: "cp.async.bulk cp.reduce.async.bulk tensormap st.async red.async prefetch#tensormap prefetch.tensormap",
    Class.CP_ASYNC: "cp.async",
    Class.GLOBAL: "prefetch prefetchu applypriority discard",
    Class.MMA_SYNC: "mma",
    Class.WGMMA: "wgmma",
    Class.TENSOR_MMA: "tcgen05.mma",
    Class.TENSOR_MOVE: "tcgen05.ld tcgen05.st",
    Class.TENSOR: "tcgen05",
    Class.CONTROL: "griddepcontrol exit brkpt trap nanosleep pmevent setmaxnreg clusterlaunchcontrol",
    Class.MOVE: "cvta",
}
_BY_OPCODE = {name: kind for kind, names in _FIXED.items() for name in names.split()}
_NARROW = ("f16", "bf16", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0", "tf32")
# The table gives these a quarter of the rate of other integer operations.
_SLOW_INTEGER = frozenset({"popc", "clz", "bfind", "fns", "brev"})


@dataclass(frozen=True)
class Cost:
    """What a warp's instruction asks of an SM.

    Attributes:
        unit: that works on it besides the slot that it is issued in; None where no public rate is known, or where its
            amounts are counted in bytes, wavefronts or multiplications.
        results: of that unit for a whole warp.
    """

    unit: Unit | None
    results: int


@lru_cache(maxsize=4096)
def classify(op: Op) -> Class:
    """The class of an instruction; KeyError if it has none."""
    if op.form.id in _BY_OPCODE:
        return _BY_OPCODE[op.form.id]
    words = op.name.split(".")
    for count in range(len(words), 0, -1):
        kind = _BY_OPCODE.get(".".join(words[:count]))
        if kind is not None:
            return kind
    return _BY_TYPE[op.name](op)


def _arithmetic(op: Op) -> Class:
    variant = op.form.id.partition("#")[2]
    kind = op["type"] or ""
    if variant in ("float", "mixed"):
        return Class.FP64 if kind == "f64" else Class.FP32
    if variant == "packed":
        return Class.FP32X2
    if variant == "half":
        return Class.HALF
    return Class.MULTIPLY if op.name in ("mul", "mad") else Class.INTEGER


def _compared(op: Op) -> Class:
    return Class.FP64 if op["type"] == "f64" else Class.SELECT


def _signed(op: Op) -> Class:
    """The sign of a float is an operand's modifier or a logical operation."""
    return Class.INTEGER


def _divided(op: Op) -> Class:
    """Sequences around an approximate reciprocal; what is around it is not counted."""
    if op.form.id == "div#int" or op.name == "rem":
        return Class.INTEGER
    return Class.FP64 if op["type"] == "f64" and op["mode"] != "approx" else Class.MUFU


def _logical(op: Op) -> Class:
    return Class.SELECT if op["type"] == "pred" else Class.INTEGER


def _moved(op: Op) -> Class:
    """Wider registers are pairs of 32 bits and need no packing; two halves have to be put into one register."""
    return Class.INTEGER if op.form.id == "mov#pack" and op["type"] in ("b32", "u32") else Class.MOVE


def _converted(op: Op) -> Class:
    to, of = op["dtype"] or "", op["atype"] or ""
    if to.startswith(_NARROW) and of in ("f32", "f16x2", "bf16x2", "f16", "bf16"):
        return Class.PACK
    if "#" in op.form.id:
        return Class.PACK  # ptxas 13.0 makes F2FP of them, of those from 8 to 16 bits as well
    if (to, of) == ("f32", "f16"):
        return Class.HALF  # ptxas 13.0 makes an addition to zero of it: HADD2.F32
    if to[0] in "us" and of[0] in "us":
        # Between registers of 32 and 64 bits: a register is dropped, or cleared.
        return Class.MOVE if of in ("u32", "u64", "s64") and to not in _BYTES else Class.INTEGER
    if (to, of) == ("f32", "bf16"):
        return Class.INTEGER  # 16 bits further up, by definition of the format
    return Class.CONVERT


_BYTES = ("u8", "s8", "u16", "s16")


def _accessed(op: Op) -> Class:
    space = (op["space"] or "").partition("::")[0]
    if space == "shared":
        return Class.SHARED
    if op["space"] == "param::func" or space == "local":
        return Class.LOCAL
    if space == "param":
        return Class.PARAMETER if op.name == "ld" else Class.LOCAL
    return Class.PARAMETER if space == "const" else Class.GLOBAL


_BY_TYPE = (
    dict.fromkeys(("add", "sub", "mul", "mad", "fma"), _arithmetic)
    | dict.fromkeys(("min", "max"), _compared)
    | dict.fromkeys(("abs", "neg"), _signed)
    | dict.fromkeys(("div", "rem", "rcp", "sqrt", "rsqrt"), _divided)
    | dict.fromkeys(("and", "or", "xor", "not", "shl", "shr", "shf"), _logical)
    | {"mov": _moved, "cvt": _converted, "ld": _accessed, "st": _accessed}
)


@lru_cache(maxsize=4096)
def cost(op: Op) -> Cost:
    """The unit that works on an instruction, and how much of it a warp's takes; see `Rates` for the rates."""
    kind = classify(op)
    unit, results = _UNIT.get(kind), WARP
    if kind is Class.FP32X2 or (kind is Class.MUFU and (op["type"] or "").endswith("x2")):
        results = 2 * WARP
    elif kind is Class.MULTIPLY:
        results = 2 * WARP  # 64 a cycle where the FMA unit does 128 of FP32
    elif kind is Class.INTEGER and op.name in _SLOW_INTEGER:
        results = 4 * WARP
    elif op.name in ("shfl.sync", "movmatrix"):
        unit = Unit.SHUFFLE
    elif op.name == "redux.sync":
        unit, results = Unit.SHUFFLE, 2 * WARP  # 16 a cycle where shuffles do 32
    return Cost(unit, results)
