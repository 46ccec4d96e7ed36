# SPDX-License-Identifier: Apache-2.0
"""vLLM's tensor, pipeline and data parallelism: the plugin serves in every worker with unchanged answers."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from integration.compare import TOLERANCE
from integration.conftest import Checkpoint
from integration.environment import device
from integration.judge import Judge, requests
from integration.misuse import CONTEXT
from integration.models import MODELS
from integration.server import Server, serve
from integration.streams import at_once, body_of, stream

pytestmark = pytest.mark.e2e

REQUESTS = requests(12, 24, seed=2)
WORKERS = 2
# With Ray the log lines start with the engine's name and Ray's coloured prefix, before the worker's own.
SERVED = re.compile(r"\(\S+ pid=(?P<pid>\d+)\) [^()\n]*dsl serves attention of (?P<heads>\S+) heads")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to use two workers.

    Attributes:
        heads: query and key heads of each worker; the small Llama has 4 and 2.
        eager: without compilation. On a CPU vLLM 0.32.0 makes the tensors that stages exchange only while it compiles.
        ray: workers are Ray's and not the server's own processes. vLLM 0.32.0 refuses it on a CPU.
    """

    id: str
    flags: tuple[str, ...]
    heads: str = "4/2"
    eager: bool = True
    ray: bool = False
    environment: dict[str, str] = field(default_factory=dict)


# vLLM binds each CPU worker to a NUMA node of its own, and exits if there are too few.
UNBOUND = {} if device().cuda else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
WAYS = (
    pytest.param(
        Way(id="tensor", flags=("--tensor-parallel-size", "2"), heads="2/1", environment=UNBOUND), id="tensor"
    ),
    pytest.param(
        Way(id="pipeline", flags=("--pipeline-parallel-size", "2"), eager=device().cuda, environment=UNBOUND),
        id="pipeline",
        marks=pytest.mark.full,
    ),
    pytest.param(Way(id="data", flags=("--data-parallel-size", "2")), id="data", marks=pytest.mark.full),
    pytest.param(
        Way(
            id="ray",
            flags=("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"),
            heads="2/1",
            ray=True,
            environment={"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        ),
        id="ray",
        marks=pytest.mark.full,
    ),
)


@pytest.fixture(scope="module")
def judge(checkpoint: Checkpoint) -> Judge:
    return Judge(checkpoint("llama", MODELS["llama"]), REQUESTS)


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Way, Server]]:
    way: Way = request.param
    if device().cuda and torch.cuda.device_count() < WORKERS:
        pytest.skip(f"{torch.cuda.device_count()} GPU, {WORKERS} are needed")
    if way.ray and not device().cuda:
        pytest.skip("vLLM has Ray's workers on GPUs only")
    if way.ray and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    flags = ["--attention-backend", "dsl", "--dtype", device().dtypes[0], "--max-model-len", str(CONTEXT)]
    flags += ["--max-num-seqs", "8", *way.flags, *(["--enforce-eager"] if way.eager else [])]
    # A server that is not eager must compile.
    environment = (device().environment if way.eager else {}) | way.environment
    log = tmp_path_factory.mktemp("parallel") / "log"
    with serve(checkpoint("llama", MODELS["llama"]), log, *flags, **environment) as server:
        yield way, server


def test_answers(served: tuple[Way, Server], judge: Judge) -> None:
    """Log-probabilities and greedy tokens equal those of vLLM's own backend with one worker."""
    _, server = served
    streamed = at_once([partial(stream, server.url, body_of(one.prompt, one.tokens)) for one in REQUESTS])
    for request, one in zip(REQUESTS, streamed, strict=True):
        assert one.fault(request.tokens) is None
    judge.check(REQUESTS, [one.answer for one in streamed], TOLERANCE)


def test_plugin_serves_in_every_worker(served: tuple[Way, Server]) -> None:
    way, server = served
    found = {match["pid"]: match["heads"] for match in SERVED.finditer(server.log)}
    assert list(found.values()) == [way.heads] * WORKERS, server.log[-4000:]
    if not way.ray:
        assert {int(pid) for pid in found} <= set(server.processes())
