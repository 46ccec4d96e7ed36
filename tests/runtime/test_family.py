# SPDX-License-Identifier: Apache-2.0
"""The list of operator families is whole, and each of them answers all that the commands ask."""

from pathlib import Path

import pytest

import dsl_backend
from dsl_backend.errors import InvalidInput
from dsl_backend.families import NAMES, TUNED
from dsl_backend.runtime import family as families
from dsl_backend.runtime.family import Family
from dsl_backend.runtime.target import from_arch

LOAD_ALL = families.load_all
PACKAGE = Path(dsl_backend.__file__).parent


def test_every_package_with_a_dispatch_table_is_a_family() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/dispatch.py")} - {"runtime"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_whole(name: str) -> None:
    family = families.load(name)
    assert family.name == name
    target = from_arch("sm_90a")
    needed = {operation for spec in family.typical_layers(target).values() for operation in family.operations_of(spec)}
    assert needed == set(family.tables), "the doctor shows every operation"
    checked = {check.operation for check in family.checks.values()}
    assert checked <= set(family.tables)
    assert checked >= set(family.tables) - set(family.optional), "verify checks every operation that serves by default"
    for table in family.tables.values():
        assert [entry.name for entry in table][-1] == "reference", "best first"


def test_a_file_of_tuned_configs_may_have_records_of_each_kind() -> None:
    assert tuple(one.family for family in LOAD_ALL() for one in family.tuned_configs) == TUNED


def test_checks_have_one_name_each() -> None:
    names = [check for family in LOAD_ALL() for check in family.checks]
    assert len(names) == len(set(names))


def test_families_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Family(name=name, precompile_specs=lambda model, target: []) for name in ("one", "two"))
    monkeypatch.setattr(families, "load_all", lambda: (one, two))
    assert families.chosen() == [one, two]
    assert families.chosen(["two"]) == [two]
    with pytest.raises(InvalidInput, match="family 'three' is not one of one, two"):
        families.chosen(["two", "three"])
    with pytest.raises(
        InvalidInput, match="family 'one' is not one of attention, experts, linear, norm, sampling, softmax"
    ):
        families.load("one")
