# SPDX-License-Identifier: Apache-2.0
"""The parts of a dense decoder layer: its products, its attention, and what is launched between them.

Engines have other kernels for the same layer, and another number of them. Their launches are compared by the part that
they belong to, which follows from their order and from the names of products and of attention.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .trace import Launch

# Of cuBLAS and CUTLASS, and of this package. Attention is looked for first: its names may have GEMM's in them.
PRODUCT = re.compile(r"gemm|gemv|nvjet|xmma", re.IGNORECASE)
# The sum of a product that cuBLAS splits along K, in a launch of its own.
SPLIT_SUM = re.compile(r"split_?k_?reduce", re.IGNORECASE)
# vLLM's, FlashInfer's and this package's kernels, with their merge of split keys.
ATTENTION = re.compile(
    r"flash|fmha|unified_attention|reduce_segments|PagedKVCache|dsl_backendattentioncute(sm|combine)"
    r"|(split_kv|prefill|batch_invariant|combine)_kernel",
    re.IGNORECASE,
)
NOT_ATTENTION = re.compile(r"reshape_and_cache|write_kv|rope")


@dataclass(frozen=True)
class Part:
    """A part of a layer, in one engine.

    Attributes:
        name: of a product, which has the sum of its splits; `attention`; or `behind` one of these, for what comes
            before the next.
        launches: how many belong to it.
        us: what they add to the step.
    """

    name: str
    launches: int
    us: float


def kind(name: str) -> str:
    """What a kernel is by its name: `attention`, `product`, `sum` of a product, or `other`."""
    if ATTENTION.search(name) and not NOT_ATTENTION.search(name):
        return "attention"
    if SPLIT_SUM.search(name):
        return "sum"
    return "product" if PRODUCT.search(name) else "other"


def parts(sequence: Sequence[Launch], products: Sequence[str]) -> list[Part]:
    """The parts of a layer in their order, from its first product on; each launch belongs to one.

    Args:
        sequence: the launches of a layer, from any of them on.
        products: the names of its products; attention comes between the first and the second.

    Raises:
        ValueError: the launches are not those of such a layer.
    """
    kinds = [kind(launch.name) for launch in sequence]
    if "attention" not in kinds:
        raise ValueError("a layer has no launch whose name is known as attention's")
    if kinds.count("product") != len(products):
        raise ValueError(f"a layer has {kinds.count('product')} products, and not {', '.join(products)}")
    first = next(
        at for at in range(len(kinds)) if kinds[at] != "attention" and kinds[(at + 1) % len(kinds)] == "attention"
    )
    # Back to the product in front of attention.
    begin = next(at for at in range(first, first - len(kinds), -1) if kinds[at] == "product")
    order = [(begin + at) % len(kinds) for at in range(len(kinds))]
    found: dict[str, list[Launch]] = {}
    done, last = 0, ""
    for at in order:
        if kinds[at] == "product":
            done, last = done + 1, products[done]
        elif kinds[at] == "attention":
            if done != 1:
                raise ValueError(f"a layer's attention comes behind {products[done - 1]}, and not {products[0]}")
            last = "attention"
        named = last
        if kinds[at] == "other":
            named = f"behind {last}"
        found.setdefault(named, []).append(sequence[at])
    return [Part(name, len(of_part), sum(one.adds_us for one in of_part)) for name, of_part in found.items()]


def compared(engines: Mapping[str, Sequence[Part]], floors: Mapping[str, float]) -> list[list[str]]:
    """The rows of a table: each part, its floor, and for each engine the time, the launches and the time by the floor.

    Args:
        engines: the parts of each engine, by its name.
        floors: us, by the names of parts; others have none.
    """
    names: list[str] = []
    for found in engines.values():  # a part that only some engines have comes behind the one that it follows
        behind = -1
        for part in found:
            if part.name not in names:
                names.insert(behind + 1, part.name)
            behind = names.index(part.name)
    head = ["part", "floor us", *(title for name in engines for title in (f"{name} us", "launches", "by floor"))]
    rows = [head]
    for name in names:
        floor = floors.get(name)
        cells = [name, "" if floor is None else f"{floor:.2f}"]
        for found in engines.values():
            mine = next((one for one in found if one.name == name), None)
            if mine is None:
                cells += ["", "", ""]
            else:
                cells += [f"{mine.us:.2f}", f"{mine.launches}", f"{mine.us / floor:.2f}x" if floor else ""]
        rows.append(cells)
    return rows
