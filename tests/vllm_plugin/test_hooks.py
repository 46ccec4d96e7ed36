# SPDX-License-Identifier: Apache-2.0
"""Each change to vLLM is in the list, can be installed, and is needed by the installed vLLM."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from typer.testing import CliRunner
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dsl_backend.cli import app
from dsl_backend.vllm_plugin import compat, hooks
from dsl_backend.vllm_plugin.hooks import HOOKS, Hook, Stage, install_hooks
from tests.vllm_plugin.test_dense import make_builder, make_impl

PLUGIN = Path(inspect.getfile(hooks)).parent
# What the oldest supported vLLM lacks, or a CPU's.
NOT_EVERYWHERE = frozenset({"warm_up", "sleep"})
by_name = pytest.mark.parametrize("hook", HOOKS, ids=[hook.name for hook in HOOKS])


@by_name
def test_entry_is_complete(hook: Hook) -> None:
    assert all(getattr(hook, field.name) for field in dataclasses.fields(hook))
    expected = 1 if hook.stage is Stage.METADATA_BUILDER else 0
    assert len(inspect.signature(hooks.resolve(hook.install)).parameters) == expected


@by_name
def test_entry_is_still_needed(hook: Hook) -> None:
    needed = hooks.resolve(hook.needed)()
    assert isinstance(needed, bool)
    assert needed or hook.name in NOT_EVERYWHERE, hook.remove_when


def test_names_are_unique_in_both_lists() -> None:
    names = [entry.name for entry in (*HOOKS, *compat.DIFFERENCES)]
    assert len(names) == len(set(names))


def test_every_wrapper_is_in_the_list() -> None:
    """A module that wraps something of vLLM marks its wrapper; each such module belongs to a hook."""
    marked = {
        ".".join(path.relative_to(PLUGIN).with_suffix("").parts)
        for path in PLUGIN.rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr == "wrapped_by_dsl" and isinstance(node.ctx, ast.Store)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert len(marked) >= 5
    assert marked <= {hook.install.partition(":")[0] for hook in HOOKS}


def test_only_the_list_installs() -> None:
    """No other module of the plugin calls what a hook installs."""
    installers = {tuple(hook.install.split(":")) for hook in HOOKS if hook.stage is not Stage.REGISTRATION}
    names = {f"{module.rpartition('.')[2]}.{function}" for module, function in installers}
    calls = {
        ast.unparse(node.func)
        for path in PLUGIN.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert not names & calls


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the hooks that are installed from now on; none of them is."""
    seen: list[str] = []

    def resolve(reference: str) -> object:
        (name,) = [hook.name for hook in HOOKS if hook.install == reference]
        return lambda *arguments: seen.append(name)

    monkeypatch.setattr(hooks, "resolve", resolve)
    return seen


def test_stages(installed: list[str], plain_config: VllmConfig) -> None:
    """Each hook is installed by exactly one of its stages' callers: the registration, a layer, a metadata builder."""
    stages = {stage: [hook.name for hook in HOOKS if hook.stage is stage] for stage in Stage}
    install_hooks(Stage.REGISTRATION)
    assert installed == stages[Stage.REGISTRATION]
    installed.clear()
    make_impl()
    assert installed == stages[Stage.FIRST_LAYER]
    installed.clear()
    make_builder(plain_config, torch.bfloat16)
    assert installed == stages[Stage.METADATA_BUILDER]


def test_failures_at_registration_are_logged_and_stop_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "failures", {})
    monkeypatch.setattr(hooks, "resolve", lambda reference: broken)
    install_hooks(Stage.REGISTRATION)
    assert "hook cpu_selection failed" in caplog.text
    assert "no such vLLM" in caplog.text
    names = [hook.name for hook in HOOKS if hook.stage is Stage.REGISTRATION]
    assert hooks.failures == dict.fromkeys(names, "RuntimeError: no such vLLM")


def test_failures_at_later_stages_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "resolve", lambda reference: broken)
    with pytest.raises(RuntimeError, match="no such vLLM"):
        install_hooks(Stage.FIRST_LAYER)


def broken() -> None:
    raise RuntimeError("no such vLLM")


def test_the_list_is_read_without_vllm_and_torch() -> None:
    code = (
        "import sys; from dsl_backend.vllm_plugin.hooks import lines; text = lines();"
        "print(len(text), sorted({'vllm', 'torch', 'triton', 'cutlass'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split(" ", 1) == [str(5 * len(HOOKS)), "[]\n"]


def test_the_command_prints_the_list() -> None:
    printed = CliRunner().invoke(app, ["env", "--hooks"])
    assert printed.exit_code == 0
    assert printed.stdout.splitlines() == hooks.lines()
    assert printed.stdout.startswith("attention_member: AttentionBackendEnum has a member DSL")


def test_the_member_is_there() -> None:
    install_hooks(Stage.REGISTRATION)
    assert "DSL" in AttentionBackendEnum.__members__
