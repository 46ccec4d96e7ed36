# SPDX-License-Identifier: Apache-2.0
"""The list of differences between versions describes the installed vLLM."""

from types import SimpleNamespace

import pytest
import torch

from dsl_backend.vllm_plugin import compat

# What the newest supported vLLM still needs. One that is not needed any more has seen its day: see its remove_when.
NEWEST = {
    *("pickled_members", "cpu_mla_prefill", "mla_head_sizes", "discarded_draws"),
}


@pytest.mark.parametrize("entry", compat.DIFFERENCES, ids=lambda entry: entry.name)
def test_entry_is_complete_and_decidable(entry: compat.Entry) -> None:
    assert all((entry.what, entry.why, entry.remove_when))
    assert isinstance(entry.needed(), bool)


@pytest.mark.skipif(compat._enum_cannot_grow(), reason="this is not the newest supported vLLM")
@pytest.mark.parametrize("entry", [e for e in compat.DIFFERENCES if e.name in NEWEST], ids=lambda entry: entry.name)
def test_entry_is_still_needed(entry: compat.Entry) -> None:
    assert entry.needed(), f"{entry.name} can go where it was needed for new versions only: {entry.remove_when}"


def test_names_are_unique() -> None:
    names = [entry.name for entry in compat.DIFFERENCES]
    assert len(names) == len(set(names))
    assert set(names) >= NEWEST


def test_both_forms_of_a_context_chunk() -> None:
    starts, kv_starts = torch.tensor([0, 4, 6]), torch.tensor([0, 9, 9])
    expected = compat.ContextChunk(1, starts, kv_starts, 4, 9)
    chunk = SimpleNamespace(index=1, query_start_loc=starts, cu_seq_lens=kv_starts, max_query_len=4, max_seq_len=9)
    assert compat.context_chunk(chunk, None) == expected
    context = SimpleNamespace(cu_seq_lens=[starts, kv_starts], max_seq_lens=[4, 9])
    prefill = SimpleNamespace(query_start_loc=starts, max_query_len=4, chunked_context=context)
    assert compat.context_chunk(1, prefill) == expected
