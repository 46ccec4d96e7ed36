# SPDX-License-Identifier: Apache-2.0
"""Servers under load, in every setting that changes the steps of the engine: answers, misuse, memory, shutdown.

Every answer is checked against an exact engine, and in float32 against the answer to the same request alone.
"""

import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from integration.compare import TOLERANCE
from integration.conftest import Checkpoint
from integration.environment import device
from integration.judge import LONGEST_PROMPT, Judge, Request, requests
from integration.misuse import BAD, CONTEXT, abandon, break_off, refused
from integration.models import MODELS
from integration.offline import Answer
from integration.server import Server, serve
from integration.streams import Streamed, at_once, body_of, stream

pytestmark = pytest.mark.e2e

LOAD = device().load
PAGE = 16
REQUESTS = requests(LOAD.streams, LOAD.longest)
ALONE = REQUESTS[: LOAD.alone]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Growth of all processes in a round of requests that counts as none, and rounds until a round has to be like that: at
# first every round touches pages of the cache and of the allocators that none before has.
FLAT_BYTES = 4 << 20
ROUNDS = 6
PREEMPTIONS = "vllm:num_preemptions_total"
GENERATED = "vllm:generation_tokens_total"
ACCEPTED_NOW = ("vllm:num_requests_running", "vllm:num_requests_waiting")
HITS = "vllm:prefix_cache_hits_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ERROR = re.compile(r"^(?:\([^)]*\) .*\] )?(?:\w+\.)*(\w+(?:Error|Exception))\b", re.MULTILINE)
FLAGS = (
    *("--attention-backend", "dsl", "--dtype", device().dtypes[0], "--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", str(LOAD.sequences), "--block-size", str(PAGE)),
    # Without it vLLM kills its engine at once, and the streams end with an error or wait for one (0.32.0).
    *("--shutdown-timeout", str(LOAD.end_s)),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to serve.

    Attributes:
        counters: metrics that must grow under load, which shows that the setting is active.
    """

    id: str
    caching: bool
    pages: int | None = None
    speculation: str | None = None
    flags: tuple[str, ...] = ()
    counters: tuple[str, ...]
    full: bool = False
    why: str


SETTINGS = (
    Setting(
        id="preemption",
        caching=False,
        pages=LOAD.pages,
        counters=(PREEMPTIONS,),
        why="requests are preempted and recomputed",
    ),
    Setting(
        id="prefix-ngram",
        caching=True,
        speculation="ngram",
        flags=("--max-num-batched-tokens", "64"),
        counters=(HITS, DRAFTED, ACCEPTED),
        why="prompts start after cached pages and are processed in chunks, together with queries of several tokens",
    ),
    Setting(
        id="draft-model",
        caching=False,
        speculation="draft_model",
        counters=(DRAFTED, ACCEPTED),
        why="a second model with a cache of its own, built for by another path of vLLM's",
    ),
    Setting(
        id="all",
        caching=True,
        pages=LOAD.pages,
        speculation="draft_model",
        flags=("--max-num-batched-tokens", "64"),
        counters=(PREEMPTIONS, HITS, DRAFTED, ACCEPTED),
        full=True,
        why="all of the above together",
    ),
)


def flags_of(setting: Setting, checkpoint: Checkpoint) -> list[str]:
    flags = [*FLAGS, *setting.flags, "--enable-prefix-caching" if setting.caching else "--no-enable-prefix-caching"]
    if setting.pages is not None:
        flags += ["--num-gpu-blocks-override", str(setting.pages)]
    if setting.speculation == "ngram":
        flags += ["--speculative-config", json.dumps(NGRAM)]
    if setting.speculation == "draft_model":
        draft = checkpoint("draft", MODELS["llama"].changed(num_hidden_layers=2))
        # Without this vLLM chooses the draft's backend by itself.
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "attention_backend": "dsl"}
        flags += ["--speculative-config", json.dumps(config)]
    return flags


@dataclass(frozen=True)
class Loaded:
    """A server, and what it answered to requests that came alone.

    Attributes:
        mode: how its steps run, eager or graphs.
    """

    setting: Setting
    mode: str
    server: Server
    judge: Judge
    alone: dict[Request, Answer]


@pytest.fixture(scope="module")
def judge(checkpoint: Checkpoint) -> Judge:
    return Judge(checkpoint("llama", MODELS["llama"]), REQUESTS)


def settings() -> list[object]:
    """Every setting, with CUDA graphs if there is a GPU, and with the marker `full` in eager mode too."""
    cases: list[object] = []
    for setting in SETTINGS:
        for mode in ("graphs", "eager") if device().cuda else ("eager",):
            full = setting.full or (device().cuda and mode == "eager")
            marks = (pytest.mark.full,) if full else ()
            cases.append(pytest.param((setting, mode), id=f"{setting.id}-{mode}", marks=marks))
    return cases


@pytest.fixture(scope="module", params=settings())
def loaded(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, judge: Judge
) -> Iterator[Loaded]:
    setting, mode = request.param
    flags = flags_of(setting, checkpoint) + (["--enforce-eager"] if mode == "eager" else [])
    log = tmp_path_factory.mktemp("load") / "log"
    with serve(checkpoint("llama", MODELS["llama"]), log, *flags, **device().environment) as server:
        alone = {one: whole(ask(server, one), one) for one in ALONE}
        yield Loaded(setting, mode, server, judge, alone)


def ask(server: Server, request: Request) -> Streamed:
    return stream(server.url, body_of(request.prompt, request.tokens))


def whole(streamed: Streamed, request: Request) -> Answer:
    """Raises AssertionError if the answer is not complete."""
    fault = streamed.fault(request.tokens)
    assert fault is None, f"{len(request.prompt)} tokens in, {request.tokens} to come: {fault}"
    return streamed.answer


def check(loaded: Loaded, asked: list[Request], streamed: list[Streamed]) -> None:
    """Checks that all answers are complete and right; on a CPU they equal the answers to the same requests alone."""
    answers = [whole(one, request) for one, request in zip(streamed, asked, strict=True)]
    loaded.judge.check(asked, answers, TOLERANCE)
    if device().dtypes[0] == "float32":
        for request, answer in zip(asked, answers, strict=True):
            assert answer.tokens == loaded.alone[request].tokens


def test_alone(loaded: Loaded) -> None:
    loaded.judge.check(list(loaded.alone), list(loaded.alone.values()), TOLERANCE)


def test_many_streams(loaded: Loaded) -> None:
    """More concurrent requests than fit into a batch. The setting's own counters show that it is active."""
    before = {name: loaded.server.metric(name) for name in loaded.setting.counters}
    for _ in range(ROUNDS):
        streamed = at_once([partial(ask, loaded.server, request) for request in REQUESTS])
        check(loaded, REQUESTS, streamed)
        stayed = [name for name, value in before.items() if loaded.server.metric(name) <= value]
        if not stayed:
            break
        # On few cores requests may start so slowly that few run at the same time; then no request lacks a page.
    assert stayed == []
    loaded.server.await_idle()


def test_prefix_caching_is_off(loaded: Loaded) -> None:
    """With the prefix cache off it has no hits, although a third of the prompts share a prefix."""
    assert (loaded.server.metric(HITS) > 0) == loaded.setting.caching


Misuse = Callable[[Server, random.Random, Request], str | None]


def abort(server: Server, numbers: random.Random, request: Request) -> str | None:
    """The client disconnects after a few tokens."""
    return abandon(server, request, pieces=numbers.randint(1, 8))


def disconnect(server: Server, numbers: random.Random, request: Request) -> str | None:
    """The client disconnects before the first token, or in the middle of its request."""
    return break_off(server, request, sent=numbers.choice((0.3, 1.0, 1.0)), streaming=numbers.random() < 0.5)


def bad_request(server: Server, numbers: random.Random, _: Request) -> str | None:
    return refused(server, numbers.choice(BAD))


def misuse_round(loaded: Loaded, misuse: Misuse, share: float, seed: int) -> None:
    """Sends all requests at once, mixed with misbehaving ones; the good ones must be answered as usual."""
    numbers = random.Random(seed)
    bad = [
        partial(misuse, loaded.server, random.Random(numbers.random()), numbers.choice(REQUESTS))
        for _ in range(max(2, round(share * len(REQUESTS))))
    ]
    good = [partial(ask, loaded.server, request) for request in REQUESTS]
    calls: list[partial[Streamed] | partial[str | None]] = [*good, *bad]
    numbers.shuffle(calls)
    results = dict(zip(calls, at_once(calls), strict=True))
    check(loaded, REQUESTS, [one for call in good if isinstance(one := results[call], Streamed)])
    assert [fault for call in bad if (fault := results[call]) is not None] == []
    loaded.server.await_idle()


@pytest.mark.parametrize(
    ("misuse", "share"),
    [
        pytest.param(abort, 0.5, id="abort in mid-stream"),
        pytest.param(disconnect, 0.5, id="client disconnects"),
        pytest.param(bad_request, 0.05, id="bad requests"),
    ],
)
def test_misuse(loaded: Loaded, misuse: Misuse, share: float) -> None:
    """The other requests get right answers, all requests end, and the server's memory does not grow."""
    # The abandoned answers would have at least 200 tokens each, so fewer tokens show that the engine aborted them. A
    # busy machine may notice a disconnect too late in some rounds; without an abort every round has all tokens.
    most = 0.5 * (CONTEXT - LONGEST_PROMPT) * share * len(REQUESTS)
    held: list[int] = []
    wasted: list[float] = []
    for seed in range(ROUNDS + 1):
        before = loaded.server.metric(GENERATED)
        misuse_round(loaded, misuse, share, seed)
        wasted.append(loaded.server.metric(GENERATED) - before - sum(request.tokens for request in REQUESTS))
        held.append(loaded.server.resident_bytes())
        if seed > 0 and held[-1] - held[-2] <= FLAT_BYTES and min(wasted) < most:
            break
    assert 0 <= min(wasted) < most, wasted
    said = ", ".join(f"{size / 2**20:.1f}" for size in held)
    print(f"{loaded.setting.id}: {misuse.__name__}: MiB after each round: {said}")
    assert held[-1] - held[-2] <= FLAT_BYTES, said
    check(loaded, ALONE[:3], [ask(loaded.server, request) for request in ALONE[:3]])


def test_log(loaded: Loaded) -> None:
    """`dsl` served all layers, including those of drafts, and the server logged no error."""
    served = [line for line in loaded.server.log.splitlines() if "dsl serves attention" in line]
    assert served
    assert all(device().serves(line) for line in served)
    assert "Traceback" not in loaded.server.log


# The last one: it ends the server.
def test_sigterm(loaded: Loaded) -> None:
    """SIGTERM under load: the server ends, and no answer that it had started is damaged."""
    server, asked = loaded.server, REQUESTS[: LOAD.sequences]
    tokens = min(3 * LOAD.longest, CONTEXT - LONGEST_PROMPT)
    with ThreadPoolExecutor(len(asked)) as threads:
        bodies = [body_of(request.prompt, tokens) for request in asked]

        def begin() -> list[Future[Streamed]]:
            return [threads.submit(stream, server.url, body, timeout_s=2 * LOAD.end_s) for body in bodies]

        streams = begin()
        limit = time.monotonic() + LOAD.end_s
        while sum(map(server.metric, ACCEPTED_NOW)) < 0.75 * len(asked):
            assert time.monotonic() < limit, "no load"
            if sum(future.done() for future in streams) > len(asked) / 4:
                # On few cores the first requests may end before the last ones start, so not all run at the same time.
                wait(streams)
                streams = begin()
            # On few cores, polling too often keeps the server from starting requests before the first ones end.
            time.sleep(0.05)
        unfinished = sum(not future.done() for future in streams)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(2 * LOAD.end_s)
        took = time.monotonic() - began
        ends = [future.result() for future in streams]
    print(f"{loaded.setting.id}: status {status} {took:.1f} s after SIGTERM, with {unfinished} streams unfinished")
    assert unfinished > len(asked) / 2
    assert status == 0
    before, _, after = server.log.partition("[shutdown] API server: shutdown triggered")
    assert after
    assert "Traceback" not in before
    # After a requested shutdown vLLM 0.32.0 reports EngineDeadError to requests that still wait.
    assert not [line for line in after.splitlines() if "Traceback" in line and not line.startswith("(APIServer")]
    assert set(ERROR.findall(after)) <= {"EngineDeadError"}
    while left := server.processes():
        assert time.monotonic() < began + 2 * LOAD.end_s, f"processes {left} are left"
        time.sleep(0.1)
    firsts = []
    for request, end in zip(asked, ends, strict=True):
        fault = end.fault(tokens)
        # Connections that the server had not yet accepted are refused.
        if fault is None:
            firsts.append((request, Answer([], [], end.answer.tokens[: LOAD.longest], end.answer.logprobs)))
        else:
            assert not end.answer.tokens, f"begun, and not finished: {fault}"
            assert "timed out" not in fault
    assert len(firsts) >= unfinished / 2
    loaded.judge.check([request for request, _ in firsts], [answer for _, answer in firsts], TOLERANCE)


def test_requests_are_what_they_are_for() -> None:
    """The requests are distinct, fit the context, and need more pages than the small cache has."""
    assert len(set(REQUESTS)) == len({request.prompt for request in REQUESTS}) == LOAD.streams
    assert max(len(request.prompt) + request.tokens for request in REQUESTS) <= CONTEXT
    batch = sorted(REQUESTS, key=lambda request: len(request.prompt))[: LOAD.sequences]
    assert sum(len(request.prompt) + request.tokens for request in batch) > LOAD.pages * PAGE


def test_the_judge_can_say_no(judge: Judge, tmp_path: Path) -> None:
    """A wrong token and a wrong log-probability are detected, and a right answer passes."""
    asked = REQUESTS[:2]
    exact = [judge.exact[request.prompt] for request in asked]
    right = [Answer([], [], one.tokens[:4], one.logprobs[:4]) for one in exact]
    judge.check(asked, right, TOLERANCE)
    off = [{token: value + 2 * TOLERANCE for token, value in step.items()} for step in right[0].logprobs]
    with pytest.raises(AssertionError, match="log-probability off"):
        judge.check(asked, [Answer([], [], right[0].tokens, off), right[1]], TOLERANCE)
    likely = right[1].logprobs[2]
    worst = min(likely, key=lambda token: likely[token])
    tokens = [*right[1].tokens[:2], worst]
    with pytest.raises(AssertionError, match="another token is likelier"):
        judge.check(asked, [right[0], Answer([], [], tokens, right[1].logprobs[:3])], TOLERANCE)
