# SPDX-License-Identifier: Apache-2.0
"""Which operation of the interpreter an opcode is, with its flags (PTX ISA 9.2, 9.7).

A recipe says what an opcode's modifiers come to; where operands go follows from the form's roles. An opcode without a
recipe is a trap: the machine's.
"""

from collections.abc import Callable
from typing import NamedTuple

from emulator.ptx.grammar import Op
from emulator.ptx.ir import BITS

# As in rows.h.
GUARD_NOT, FTZ, SAT, RELU = 1, 2, 4, 8
ROUNDINGS = {"rn": 0, "rz": 1 << 4, "rm": 2 << 4, "rp": 3 << 4}
NOT_SOURCE = 1 << 6
CLOCK, NAN_WINS, XORSIGN, ABS, SATFINITE, GATHERS = (1 << bit for bit in range(10, 16))
# As in floats.h, where F16x2 and others are pairs of these.
INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0")
TYPE = {name: number for number, name in enumerate((*INTEGERS, *FLOATS))}
STORED = {"f32": 0, "f64": 0, "f16": 1, "bf16": 2, "f16x2": 5, "bf16x2": 6}


class Recipe(NamedTuple):
    """What to encode.

    Attributes:
        name: of the operation.
        extra: the two constants that it takes.
        members: role of the member mask of an instruction that gathers lanes.
    """

    name: str
    flags: int = 0
    extra: tuple[int, int] = (0, 0)
    members: str | None = None


Maker = Callable[[Op], Recipe | None]
MAKERS: dict[str, Maker] = {}


def _for(*forms: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        for form in forms:
            MAKERS[form] = maker
        return maker

    return register


def recipe(op: Op) -> Recipe | None:
    """What an opcode is encoded as; None for one that traps."""
    maker = MAKERS.get(op.form.id)
    return maker(op) if maker else None


def _flags(op: Op) -> int:
    flags = 0
    for modifier, flag in (("ftz", FTZ), ("sat", SAT), ("relu", RELU), ("nan", NAN_WINS), ("xorsign", XORSIGN)):
        if op[modifier]:
            flags |= flag
    if op["satfinite"]:
        flags |= SATFINITE
    return flags | ROUNDINGS.get(op["rnd"] or "", 0)


def _type(op: Op) -> str:
    return op["type"] or ""


def _sized(op: Op) -> str:
    """b16, b32, ...: where the sign makes no difference."""
    return f"b{BITS[_type(op)]}"


# Integers.


@_for("add#int", "sub#int")
def _sum(op: Op) -> Recipe:
    if _type(op) in ("u16x2", "s16x2"):
        return Recipe("add_x2")
    return Recipe(f"{op.name}_sat_s32" if op["sat"] else f"{op.name}_{_sized(op)}")


@_for("mul#int", "mad#int")
def _product(op: Op) -> Recipe:
    mode = op["mode"]
    kind = _sized(op) if mode == "lo" else _type(op)
    return Recipe(f"{op.name}_{mode}{'_sat' if op['sat'] else ''}_{kind}")


@_for("mul24", "mad24")
def _product24(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{op['mode']}{'_sat' if op['sat'] else ''}_{_type(op)}")


@_for("sad", "div#int", "rem", "abs#int", "neg#int", "bfe")
def _by_type(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{_type(op)}")


@_for("min#int", "max#int")
def _extreme(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{'relu_' if op['relu'] else ''}{_type(op)}")


@_for("popc", "clz", "brev", "bfi", "fns")
def _of_bits(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{_type(op)}")


@_for("bfind")
def _bfind(op: Op) -> Recipe:
    return Recipe(f"bfind_{'shiftamt_' if op['shiftamt'] else ''}{_type(op)}")


@_for("szext")
def _szext(op: Op) -> Recipe:
    return Recipe(f"szext_{op['mode']}_{_type(op)}")


@_for("bmsk")
def _bmsk(op: Op) -> Recipe:
    return Recipe(f"bmsk_{op['mode']}")


@_for("dp4a", "dp2a")
def _dot(op: Op) -> Recipe:
    kind = (op["atype"] == "s32") | (op["btype"] == "s32") << 1 | (op["mode"] == "hi") << 2
    return Recipe(op.name, 0, (kind, 0))


@_for("add#carry", "addc", "sub#carry", "subc", "mad#carry", "madc")
def _carry(op: Op) -> Recipe:
    kind = _type(op)
    if op["mode"] == "hi":
        return Recipe(f"madc_hi_{kind}")
    mode = "_lo" if op["mode"] else ""
    return Recipe(f"{op.name[:3]}c{mode}_b{BITS[kind]}")


@_for("and", "or", "xor")
def _logic(op: Op) -> Recipe:
    kind = _type(op)
    return Recipe(f"{op.name}_{'b32' if kind == 'b16' else kind}")


@_for("not")
def _not(op: Op) -> Recipe:
    return Recipe(f"not_{_type(op)}")


@_for("cnot")
def _cnot(op: Op) -> Recipe:
    return Recipe("cnot_b64" if _type(op) == "b64" else "cnot_b32")


@_for("lop3")
def _lop3(op: Op) -> Recipe:
    return Recipe("lop3")


@_for("lop3#pred")
def _lop3_pred(op: Op) -> Recipe:
    return Recipe("lop3_pred", 0, (0, int(op["bool"] == "and")))


@_for("shf")
def _shf(op: Op) -> Recipe:
    return Recipe(f"shf_{op['dir']}_{op['mode']}")


@_for("shl")
def _shl(op: Op) -> Recipe:
    return Recipe(f"shl_{_type(op)}")


@_for("shr")
def _shr(op: Op) -> Recipe:
    return Recipe(f"shr_{_type(op).replace('b', 'u')}")


# Floating point.


@_for("add#float", "sub#float", "mul#float", "add#packed", "sub#packed", "mul#packed", "fma#float", "fma#packed")
def _arithmetic(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{_type(op)}", _flags(op))


@_for("mad#float")
def _mad(op: Op) -> Recipe:
    return Recipe(f"fma_{_type(op)}", _flags(op))


@_for("div#float")
def _div(op: Op) -> Recipe:
    return Recipe("div_approx_f32" if op["mode"] == "approx" else f"div_{_type(op)}", _flags(op))


@_for("rcp", "sqrt")
def _unary(op: Op) -> Recipe | None:
    if op["mode"] == "approx" and _type(op) == "f64":
        return None
    return Recipe(f"{op.name}_{_type(op)}", _flags(op) | ROUNDINGS.get(op["mode"] or "", 0))


@_for("abs#float", "neg#float", "copysign", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
def _plain(op: Op) -> Recipe | None:
    if _type(op) in ("f32", "f64"):
        return Recipe(f"{op.name}_{_type(op)}", _flags(op))
    return _half(op)


@_for("min#float", "max#float")
def _extreme_float(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{_type(op)}", _flags(op))


@_for(
    *(f"{name}#half" for name in ("add", "sub", "mul", "fma", "abs", "neg", "min", "max")),
)
def _half(op: Op) -> Recipe | None:
    if op["oob"]:
        return None
    return Recipe(f"{op.name}_half", _flags(op), (0, STORED[_type(op)]))


@_for("add#mixed", "sub#mixed", "fma#mixed")
def _mixed(op: Op) -> Recipe:
    return Recipe(f"{op.name}_mixed", _flags(op), (0, STORED[op["atype"] or ""]))


TESTS = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")


@_for("testp")
def _testp(op: Op) -> Recipe:
    return Recipe(f"testp_{_type(op)}", 0, (TESTS.index(op["test"] or ""), 0))


# Comparison.

COMBINED = {None: 0, "and": 1, "or": 2, "xor": 3}
WRITTEN = {"u32": 1, "s32": 1, "f32": 2, "f16": 3, "bf16": 4, "u16": 5, "s16": 5, "f16x2": 3, "bf16x2": 4}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@_for("setp", "set")
def _compare(op: Op) -> Recipe | None:
    kind, cmp = _type(op), op["cmp"] or ""
    written = WRITTEN[op["dtype"] or ""] if op.name == "set" else 0
    if kind in ("f16x2", "bf16x2") and written == WRITTEN["u32"]:
        written = WRITTEN["u16"]
    extra = COMBINED[op["bool"]] | written << 2, STORED.get(kind, 0)
    if kind in STORED:
        return Recipe(f"compare_{cmp}_{'f64' if kind == 'f64' else 'f32'}", _flags(op), extra)
    if kind[0] != "s" or cmp in UNSIGNED:
        kind = "u64" if BITS[kind] == 64 else "u32"
    return Recipe(f"compare_{UNSIGNED.get(cmp, cmp)}_{kind}", 0, extra)


@_for("selp")
def _selp(op: Op) -> Recipe:
    return Recipe(f"selp_b{max(32, BITS[_type(op)])}")


@_for("slct")
def _slct(op: Op) -> Recipe:
    return Recipe(f"slct_{op['ctype']}_b{max(32, BITS[op['dtype'] or ''])}", _flags(op))


# Moves and conversions.


@_for("prmt")
def _prmt(op: Op) -> Recipe:
    modes = (None, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    return Recipe("prmt", 0, (modes.index(op["mode"]), 0))


INTEGER_ROUNDINGS = ("", "rni", "rzi", "rmi", "rpi")


@_for("cvt")
def _cvt(op: Op) -> Recipe:
    to, of, rnd = op["dtype"] or "", op["atype"] or "", op["rnd"] or ""
    flags = _flags(op)
    if to == "tf32":
        return Recipe("convert_narrow", flags, (_pair(to, of), int(rnd == "rna")))
    if (to, of) == ("f32", "bf16") and not flags and not rnd:
        return Recipe("convert_f32_bf16")
    is_integer = [kind[0] in "us" for kind in (to, of)]
    name = {
        (True, True): "convert_integer",
        (True, False): "convert_to_integer",
        (False, True): "convert_to_float",
        (False, False): "convert_float",
    }[is_integer[0], is_integer[1]]
    # A conversion to an integer without a rounding is refused by ptxas; towards zero is what C would do.
    how = INTEGER_ROUNDINGS.index(rnd) if rnd in INTEGER_ROUNDINGS else 0
    return Recipe(name, flags, (_pair(to, of), how or (2 if name == "convert_to_integer" else 0)))


def _pair(to: str, of: str) -> int:
    return TYPE[to.removesuffix("x2")] | TYPE[of.removesuffix("x2")] << 8


@_for("cvt#pack2", "cvt#pack2f4", "cvt#halves", "cvt#widen")
def _cvt_pair(op: Op) -> Recipe:
    name = {"cvt#halves": "convert_halves", "cvt#widen": "convert_widen"}.get(op.form.id, "convert_pair")
    return Recipe(name, _flags(op), (_pair(op["dtype"] or "", op["atype"] or ""), 0))


@_for("cvt.pack")
def _cvt_pack(op: Op) -> Recipe:
    kind = op["dtype"] or ""
    return Recipe("convert_pack", 0, (int(kind[1:]), int(kind[0] == "s")))


@_for("cvta", "cvta#to")
def _cvta(op: Op) -> Recipe | None:
    space = (op["space"] or "").partition("::")[0]
    if _type(op) != "u64":
        return None
    if space in ("shared", "local"):
        return Recipe(f"cvta_{'to_' if op['to'] else ''}{space}")
    if space == "param" and not op["to"]:
        return Recipe("cvta_param")
    return Recipe("mov_b64")


SPACES = {"shared": 1, "shared::cta": 1, "shared::cluster": 2, "local": 3, "param": 4, "param::entry": 4}


@_for("isspacep")
def _isspacep(op: Op) -> Recipe:
    return Recipe("isspacep", 0, (SPACES.get(op["space"] or "", 0), 0))


@_for("mapa", "getctarank")
def _cluster_address(op: Op) -> Recipe:
    return Recipe(f"{op.name}_{_type(op)}")


# Lanes.


@_for("shfl.sync")
def _shfl(op: Op) -> Recipe:
    return Recipe("shfl", GATHERS, (("up", "down", "bfly", "idx").index(op["mode"] or ""), 0), "mask")


@_for("vote.sync")
def _vote(op: Op) -> Recipe:
    return Recipe("vote", GATHERS, (("all", "any", "uni", "ballot").index(op["mode"] or ""), 0), "mask")


@_for("match.any.sync", "match.all.sync")
def _match(op: Op) -> Recipe:
    return Recipe(f"match_{op.name[6:9]}_{_type(op)}", GATHERS, members="mask")


@_for("redux.sync")
def _redux(op: Op) -> Recipe:
    kind = "b32" if op["op"] == "add" else _type(op)
    return Recipe(f"redux_{op['op']}_{kind}", GATHERS | _flags(op) | (ABS if op["abs"] else 0), members="mask")


@_for("elect.sync")
def _elect(op: Op) -> Recipe:
    return Recipe("elect", GATHERS, members="mask")


@_for("bar.warp.sync")
def _bar_warp(op: Op) -> Recipe:
    return Recipe("bar_warp_sync", GATHERS, members="mask")


@_for("activemask")
def _activemask(op: Op) -> Recipe:
    return Recipe("activemask")
