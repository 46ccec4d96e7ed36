# SPDX-License-Identifier: Apache-2.0
"""The enum members exist, survive every way that vLLM copies its config, and bring nothing heavy with them."""

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from vllm.config import AttentionConfig
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dsl_backend.vllm_plugin import enum_members, registration

registration.register()
MEMBERS: list[Any] = [AttentionBackendEnum["DSL"], MLAPrefillBackendEnum["DSL"]]


def copies(member: Any) -> dict[str, Any]:
    forking = io.BytesIO()
    ForkingPickler(forking).dump(member)
    return {
        **{f"protocol {p}": pickle.loads(pickle.dumps(member, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)},
        "ForkingPickler": pickle.loads(forking.getvalue()),
        "cloudpickle": cloudpickle.loads(cloudpickle.dumps(member)),
        "copy": copy.copy(member),
        "deepcopy": copy.deepcopy(member),
        "deepcopy in a dict": copy.deepcopy({"x": [member]})["x"][0],
    }


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: type(member).__name__)
def test_member_is_itself_after_every_copy(member: Any) -> None:
    for how, other in copies(member).items():
        assert other is member, how


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: type(member).__name__)
def test_member_behaves_as_the_others(member: Any) -> None:
    members: Any = type(member)
    assert members["DSL"] is members.DSL is members(member.value) is member
    assert member in list(members)
    assert member.name == "DSL"
    assert "DSL" in members.__members__
    assert hash(member) == hash(members.DSL)
    assert member.get_path() == member.value


def test_members_resolve_to_importable_classes() -> None:
    assert AttentionBackendEnum["DSL"].get_class().get_name() == "DSL"
    assert MLAPrefillBackendEnum["DSL"].get_class().get_name() == "DSL"


def send_name(queue: Any, config: AttentionConfig) -> None:
    queue.put((config.backend.name, config.backend.value, config.mla_prefill_backend.name))


def test_spawned_child_unpickles_a_config_before_any_plugin_is_loaded() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    config = AttentionConfig(backend="dsl", mla_prefill_backend="dsl")
    child = context.Process(target=send_name, args=(queue, config))
    child.start()
    try:
        assert queue.get(timeout=120) == ("DSL", enum_members.SELECTOR, "DSL")
    finally:
        child.join(30)
    assert child.exitcode == 0


def fresh(code: str) -> str:
    """Standard output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_unpickling_registers_in_a_process_that_knows_nothing() -> None:
    data = pickle.dumps(AttentionBackendEnum["DSL"])
    code = f"import pickle; m = pickle.loads({data!r}); print(type(m)[m.name] is m, m.name)"
    assert fresh(code) == "True DSL"


def test_importing_the_entry_point_imports_no_vllm_torch_or_kernel() -> None:
    code = (
        "import sys, dsl_backend.vllm_plugin.registration;"
        "print(sorted({'vllm', 'torch', 'triton', 'cutlass', 'numpy'} & set(sys.modules)))"
    )
    assert fresh(code) == "[]"


def test_register_imports_no_kernel_and_initialises_no_device() -> None:
    code = (
        "import sys, dsl_backend.vllm_plugin.registration as r; import vllm.v1.attention.backends.registry;"
        "import vllm.v1.attention.backends.mla.prefill.registry; from vllm.platforms import current_platform;"
        "current_platform.is_cpu(); before = set(sys.modules); r.register(); new = set(sys.modules) - before;"
        "import torch; heavy = {'triton', 'cutlass'} & new | {m for m in new if 'mla_attention' in m};"
        "print(sorted(heavy), sorted(m for m in new if m.startswith('dsl_backend.attention')),"
        " torch.cuda.is_initialized())"
    )
    assert fresh(code) == "[] [] False"


def test_register_is_idempotent() -> None:
    before = [(list(type(m).__members__), [vars(type(m))["_value2member_map_"][m.value]]) for m in MEMBERS]
    registration.register()
    registration.register()
    after = [(list(type(m).__members__), [vars(type(m))["_value2member_map_"][m.value]]) for m in MEMBERS]
    assert before == after
    assert enum_members.ensure_member() is MEMBERS[0]
    assert enum_members.ensure_prefill_member() is MEMBERS[1]
