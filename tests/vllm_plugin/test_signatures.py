# SPDX-License-Identifier: Apache-2.0
"""Every method of vLLM's that we override takes what the installed vLLM declares for it.

A parameter that a version adds is passed by vLLM, by position or by name, and is a TypeError in the middle of start-up.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

KINDS = inspect.Parameter
# Modules whose classes derive from vLLM's.
MODULES = (
    "dense",
    "backend_selector",
    "mla",
    "mla_prefill",
    "sampler.v1",
    "sampler.v2",
    "fused_mlp.method",
    "routed_experts.kernels",
)
# Only called by us.
OURS = frozenset({"__init__"})


def overridden() -> Iterator[tuple[type, type, str]]:
    """Our class, vLLM's class that declares the method last, and the method's name."""
    for name in MODULES:
        module = importlib.import_module(f"dsl_backend.vllm_plugin.{name}")
        for own in vars(module).values():
            if not inspect.isclass(own) or own.__module__ != module.__name__:
                continue
            theirs = [base for base in own.__mro__[1:] if base.__module__.startswith("vllm.")]
            for method, value in vars(own).items():
                if method in OURS or not inspect.isroutine(getattr(value, "__func__", value)):
                    continue
                base = next((base for base in theirs if method in vars(base)), None)
                if base is not None:
                    yield own, base, method


def signature(owner: type, method: str) -> inspect.Signature:
    """Of the function itself: an instance's or a class's own argument is left out."""
    value = inspect.getattr_static(owner, method)
    found = inspect.signature(inspect.unwrap(getattr(value, "__func__", value)))
    if isinstance(value, staticmethod):
        return found
    return found.replace(parameters=list(found.parameters.values())[1:])


def call_problems(ours: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """Why a call that fits theirs does not fit ours."""
    declared = [p for p in theirs.parameters.values() if p.kind not in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)]
    positional = [p.name for p in declared if p.kind is not KINDS.KEYWORD_ONLY]
    required = [name for name in positional if theirs.parameters[name].default is KINDS.empty]
    only_named = {p.name: None for p in declared if p.kind is KINDS.KEYWORD_ONLY}
    calls = {
        "all by position": (positional, only_named),
        "what has no default by position": (
            required,
            {n: None for n in only_named if theirs.parameters[n].default is KINDS.empty},
        ),
    }
    calls["all by name"] = ([], {p.name: None for p in declared})
    # An override that takes anything in one form was written for callers that use that form.
    kinds = {p.kind for p in ours.parameters.values()}
    if KINDS.VAR_POSITIONAL in kinds and KINDS.VAR_KEYWORD not in kinds:
        del calls["all by name"]
    if KINDS.VAR_KEYWORD in kinds and not kinds & {KINDS.POSITIONAL_OR_KEYWORD, KINDS.VAR_POSITIONAL}:
        calls = {"all by name": calls["all by name"]}
    found = {how: binding_problem(ours, *call) for how, call in calls.items()}
    return [f"{how}: {problem}" for how, problem in found.items() if problem]


def binding_problem(ours: inspect.Signature, values: list[str], named: dict[str, None]) -> str:
    """What Python would say of the call; empty where it fits."""
    try:
        ours.bind(*values, **named)
    except TypeError as error:
        return str(error)
    return ""


CASES = list(overridden())


@pytest.mark.parametrize(("own", "base", "method"), CASES, ids=[f"{own.__name__}.{method}" for own, _, method in CASES])
def test_takes_what_vllm_declares(own: type, base: type, method: str) -> None:
    assert call_problems(signature(own, method), signature(base, method)) == []


def test_the_methods_that_broke_are_among_them() -> None:
    names = {f"{own.__name__}.{method}" for own, _, method in CASES}
    assert {"DSLMLAImpl.do_kv_cache_update", "DSLAttentionImpl.forward", "DSLMetadataBuilder.build"} <= names


def test_a_parameter_more_is_a_problem() -> None:
    def theirs(a: Any, b: Any, more: Any = None) -> None: ...
    def ours(a: Any, b: Any) -> None: ...
    def renamed(a: Any, c: Any, more: Any = None) -> None: ...

    problems = call_problems(inspect.signature(ours), inspect.signature(theirs))
    assert [problem.partition(":")[0] for problem in problems] == ["all by position", "all by name"]
    assert any("all by name" in text for text in call_problems(inspect.signature(renamed), inspect.signature(theirs)))
    assert call_problems(inspect.signature(theirs), inspect.signature(ours)) == []
