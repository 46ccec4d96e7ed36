# SPDX-License-Identifier: Apache-2.0
"""The ledger of compatibility describes the vLLM at hand."""

import pytest

from dsl_backend.vllm_plugin import compat

# What the newest supported vLLM still needs. One that is not needed any more has seen its day: see its remove_when.
NEWEST = {"pickled_members", "cpu_selection", "cpu_mla_prefill", "mla_head_sizes"}


@pytest.mark.parametrize("entry", compat.LEDGER, ids=lambda entry: entry.name)
def test_entry_is_complete_and_decidable(entry: compat.Entry) -> None:
    assert all((entry.what, entry.why, entry.remove_when))
    assert isinstance(entry.needed(), bool)


@pytest.mark.parametrize("entry", [e for e in compat.LEDGER if e.name in NEWEST], ids=lambda entry: entry.name)
def test_entry_is_still_needed(entry: compat.Entry) -> None:
    assert entry.needed(), f"{entry.name} can go where it was needed for new versions only: {entry.remove_when}"


def test_names_are_unique() -> None:
    names = [entry.name for entry in compat.LEDGER]
    assert len(names) == len(set(names))
    assert set(names) >= NEWEST
