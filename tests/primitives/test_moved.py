# SPDX-License-Identifier: Apache-2.0
"""Names that moved come from their new modules where these are there, without a warning, and else from the old one."""

import re
import runpy
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cutlass")

from cutlass import utils

import dsl_backend
from dsl_backend.primitives import moved

PLACES = {"cutlass.memory": "SmemAllocator", "cutlass.tensor_utils": "LayoutEnum"}


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
def test_names_come_from_where_they_are(new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in PLACES.items():
        module = ModuleType(place)
        setattr(module, name, place)
        # None: it cannot be imported.
        monkeypatch.setitem(sys.modules, place, module if new else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = runpy.run_path(str(moved.__file__))
    for place, name in PLACES.items():
        assert found[name] == (place if new else getattr(utils, name))


def test_kernels_take_them_from_there() -> None:
    files = [path for path in Path(dsl_backend.__file__).parent.rglob("*.py") if path != Path(moved.__file__)]
    names = "|".join(PLACES.values())
    old = re.compile(rf"utils\.({names})|from cutlass\.utils import [^\n]*({names})")
    assert [path for path in files if old.search(path.read_text())] == []
    assert old.search("import x\nfrom cutlass.utils import LayoutEnum, hopper_helpers")
