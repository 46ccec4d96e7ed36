# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole engines without an engine: stand-ins play the process and the server."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import children, command, load, models, worker
from benchmarks.engine.extension import WorkerFacts, objection
from benchmarks.engine.scenarios import QUICK, SCENARIOS, Figure, Scenario, choose, prompts, rates
from benchmarks.engine.worker import Events, Job, Measurement, new_entries, orders

SETTINGS = {"shape": models.SHAPES["tiny"], "model": "tiny", "start_s": 60, "scenario_s": 20}
READY = {"event": "ready", "at_s": 3.0, "facts": {"served_by": {"DSL": 2}, "graphs": "NONE", "page_size": 16}}
RESULT = {"event": "result", "scenario": "b1", "unit": "output tokens/s", "rates": [90.0, 110.0], "seconds": [2.0, 1.0]}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[children.Record]]:
    """Runs `offline` with a script in the place of the engine's process; $ is the script's folder."""
    folder = tmp_path / "job"
    folder.mkdir()

    def run(script: str, **changes: object) -> list[children.Record]:
        play(monkeypatch, script)
        settings = children.Settings(cache=tmp_path, **{**SETTINGS, **changes})
        return list(children.offline("dsl", choose("b1", small=True), settings, folder))

    return run


def play(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Runs a script in the place of each engine's process. Its `add` appends an event; `folder` has the orders."""
    start = children.start

    def stand_in(_: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        head = f"import json, os, pathlib, sys, time\nfolder = pathlib.Path({str(log.parent)!r})\n"
        head += "def add(**e): (folder / 'events').open('a').write(json.dumps(e) + chr(10))\n"
        return start([sys.executable, "-c", head + script], log, environment)

    monkeypatch.setattr(children, "start", stand_in)


# An engine that logs when each of its runs began and ended, in a file that both engines share.
TURNS = f"""
sys.path.insert(0, {str(children.ROOT)!r})
from benchmarks.engine.worker import orders
add(**{{READY}})
diary = folder.parent / "diary"
def note(*words):
    with diary.open("a") as file: file.write(" ".join(map(str, words)) + chr(10))
for scenario, turn in orders(folder / "orders", os.getppid()):
    note("begin", folder.name, scenario, turn)
    if folder.name == "PEER" and (scenario, turn) == DEATH: sys.exit(3)
    time.sleep(0.1)
    note("end", folder.name, scenario, turn)
    add(event="done", scenario=scenario)
"""


def turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: tuple[str, int] | None = None, limit_s: float = 60
) -> tuple[list[tuple[str, children.Record]], list[str]]:
    """The events of two engines that take turns, and their diary."""
    play(monkeypatch, TURNS.replace("{READY}", str(READY)).replace("DEATH", repr(death)))
    settings = children.Settings(cache=tmp_path, **SETTINGS)
    chosen = choose("b1,prefill", small=True)
    events = list(children.side_by_side(["dsl", "PEER"], chosen, settings, tmp_path, limit_s))
    return events, (tmp_path / "diary").read_text().splitlines()


def test_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of one engine is followed by the same run of the other, in alternating order, never both at once."""
    _, diary = turns(tmp_path, monkeypatch)
    runs = [line.removeprefix("begin ") for line in diary[::2]]
    assert diary[1::2] == [f"end {run}" for run in runs]
    assert runs == [
        f"{backend} {scenario} {turn}"
        for turn, order in enumerate([("PEER", "dsl"), ("dsl", "PEER"), ("PEER", "dsl")])
        for scenario in ("b1", "prefill")
        for backend in order
    ]


def test_an_engine_that_dies_misses_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, diary = turns(tmp_path, monkeypatch, death=("b1", 1))
    assert [event["message"] for backend, event in events if backend == "PEER" and event["event"] == "failed"] == [
        "ended with status 3: empty log"
    ]
    assert sum(line.startswith("end dsl") for line in diary) == 6
    assert sum(line.startswith("begin PEER") for line in diary) == 3


def test_no_round_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timed run is always made."""
    _, diary = turns(tmp_path, monkeypatch, limit_s=0.1)
    assert {line.split()[-1] for line in diary} == {"0", "1"}


def test_events_of_an_engine(engine: Callable[..., list[children.Record]]) -> None:
    events = engine(f"print('Using DSL backend.', flush=True); add(**{READY}); add(**{RESULT})")
    assert [event["event"] for event in events] == ["ready", "result"]
    assert events[0]["startup_lines"] == ["Using DSL backend."]


def test_an_engine_that_dies_names_the_first_cause(engine: Callable[..., list[children.Record]]) -> None:
    script = (
        "print('RuntimeError: Engine core initialization failed. See'); print('(EngineCore) ValueError: no memory')\n"
        "sys.exit(3)"
    )
    (event,) = engine(script)
    assert event["event"] == "failed"
    assert event["message"] == "ended with status 3: ValueError: no memory"
    assert "Engine core" in event["log_tail"]


def test_a_warning_is_no_cause() -> None:
    log = "(pid=1) WARNING 01-01 [x.py:1] may end in `OSError: [Errno 24] Too many`.\nValueError: no block of 16\n"
    assert children.cause(log, 1) == "ended with status 1: ValueError: no block of 16"


def test_an_engine_that_says_why_is_not_asked_twice(engine: Callable[..., list[children.Record]]) -> None:
    (event,) = engine("add(event='failed', message='ValueError: no such backend'); sys.exit(1)")
    assert event["message"] == "ValueError: no such backend"


@pytest.mark.parametrize("script", ["time.sleep(60)", f"add(**{READY}); time.sleep(60)"], ids=["start", "scenario"])
def test_a_silent_engine_is_given_up(engine: Callable[..., list[children.Record]], script: str) -> None:
    events = engine(script, start_s=2, scenario_s=1)
    assert "no event for" in events[-1]["message"]


def test_a_half_written_event_waits(tmp_path: Path) -> None:
    path = tmp_path / "events"
    assert new_entries(path, 0) == []
    path.write_text('{"event": "a"}\n{"event": "b"}\n{"ev')
    assert [event["event"] for event in new_entries(path, 1)] == ["b"]


def test_a_job_survives_its_file() -> None:
    job = Job(backend="dsl", engine={"max_model_len": 8}, scenarios=list(SCENARIOS), vocabulary=100, seed=3)
    assert Job.from_json(job.to_json()) == job


def test_scenarios_by_name() -> None:
    assert [scenario.id for scenario in choose("prefill, b1", small=False)] == ["b1", "prefill"]
    assert choose(None, small=False) == list(SCENARIOS)
    assert max(scenario.requests * scenario.prompt for scenario in choose(None, small=True)) <= 256
    with pytest.raises(ValueError, match="no scenario b2: choose from b1"):
        choose("b2", small=False)


@pytest.mark.parametrize("quick", [False, True])
def test_scenarios_that_sample(quick: bool) -> None:
    """By name alone, and the same as the greedy ones otherwise."""
    greedy, drawn = choose("b16-sampled,b16", small=False, quick=quick)
    assert (greedy.id, greedy.sampled) == ("b16", False)
    assert drawn == replace(greedy, id="b16-sampled", sampled=True)
    for name in ("sampled-sampled", "prefill-sampled"):
        with pytest.raises(ValueError, match=f"no scenario {name}"):
            choose(name, small=False, quick=quick)


def test_a_draft_model_is_one_of_ours_with_the_engines_backend(tmp_path: Path) -> None:
    drafts = {"method": "draft_model", "model": "llama-draft", "num_speculative_tokens": 4}
    settings = children.Settings(cache=tmp_path, **SETTINGS, engine={"speculative_config": drafts})
    given = children.arguments_of("FLASH_ATTN", settings)["speculative_config"]
    assert given == drafts | {"attention_backend": "FLASH_ATTN", "model": str(tmp_path / "models" / "llama-draft")}
    config = json.loads((Path(given["model"]) / "config.json").read_text())
    assert config["vocab_size"] == models.LLAMA["vocab_size"]
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
    # Drafts by n-grams have no model; a folder of a user stays.
    for other in ({"method": "ngram", "num_speculative_tokens": 4}, drafts | {"model": "/a/draft"}):
        settings = children.Settings(cache=tmp_path, **SETTINGS, engine={"speculative_config": other})
        assert children.arguments_of("dsl", settings)["speculative_config"] == other


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.id)
@pytest.mark.parametrize("model", ["llama-8b", "deepseek-v2-lite"])
def test_requests_fit_the_model(scenario: Scenario, model: str) -> None:
    assert scenario.prompt + scenario.output <= models.SHAPES[model].max_model_len


@pytest.mark.parametrize("scenario", choose(None, small=False, quick=True), ids=lambda scenario: scenario.id)
def test_the_quick_form_fits_its_cache(scenario: Scenario) -> None:
    assert scenario.requests * (scenario.prompt + scenario.output) <= command.CACHE_TOKENS
    assert scenario.timed_runs == 3


def test_decode_steps_of_8_requests_and_behind_16k() -> None:
    """What was decoded behind a long prompt is timed without that prompt."""
    eight, behind = choose("b8,16k-b1", small=False, quick=True)
    assert (eight.requests, eight.prompt, eight.output, eight.figure) == (8, 128, 128, Figure.OUTPUT)
    assert (behind.requests, behind.prompt, behind.output, behind.figure) == (1, 16384, 128, Figure.DECODE)
    assert eight.requests in command.GRAPH_SIZES, "a step is replayed as it is"


def test_a_scenario_without_a_quick_form() -> None:
    with pytest.raises(ValueError, match="no scenario long-b32: choose from b1"):
        choose("long-b32", small=False, quick=True)


def test_steps_with_drafts_have_graphs() -> None:
    assert command.graph_sizes({}) == command.GRAPH_SIZES
    assert command.graph_sizes({"speculative_config": None}) == command.GRAPH_SIZES
    with_drafts = command.graph_sizes({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}})
    assert with_drafts == [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, 80, 128, 160, 256, 320]


def test_who_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models of the quick form fit twice into an H100, but three engines do not."""
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.torch.cuda, "mem_get_info", lambda: (0, 84.9e9))
    quick = command.parse(["--model", "llama-8b", "--quick"])
    for name in ("llama-8b", "deepseek-v2-lite"):
        assert command.takes_turns(models.SHAPES[name].backends[:2], models.SHAPES[name], quick)
        assert not command.takes_turns(models.SHAPES[name].backends, models.SHAPES[name], quick)
    for arguments in ([], ["--quick", "--in-turn"], ["--quick", "--serve"]):
        options = command.parse(["--model", "llama-8b", *arguments])
        assert not command.takes_turns(["dsl"], models.SHAPES["llama-8b"], options)


def test_orders_end_with_the_parent(tmp_path: Path) -> None:
    path = tmp_path / "orders"
    path.write_text('["b1", 0]\n["b1", 1]\nnull\n["b1", 2]\n')
    assert list(orders(path, os.getppid())) == [("b1", 0), ("b1", 1)]
    path.write_text('["b1", 0]\n')
    assert list(orders(path, parent=-1)) == []


def obeyed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[tuple[str, int]]) -> list[children.Record]:
    """The events of a worker whose engine fails at the second run of prefill."""
    runs = []

    def stand_in(_: object, prompts: list[list[int]], output: int, sampled: bool) -> float:
        runs.append(output)
        if output == 1 and runs.count(1) == 2:
            raise RuntimeError("broke")
        return 2.0

    monkeypatch.setattr(worker, "generate", stand_in)
    job = Job(backend="dsl", engine={}, scenarios=choose("b1,prefill", small=True), vocabulary=100)
    worker.obey(iter(asked), None, job, worker.Events(tmp_path / "events"))
    return [event for event in new_entries(tmp_path / "events", 0) if event["event"] != "run"]


def test_a_worker_goes_on_after_a_failed_scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = [(scenario, turn) for turn in range(3) for scenario in ("b1", "prefill")]
    events = obeyed(monkeypatch, tmp_path, asked)
    assert [event["event"] for event in events] == ["done"] * 3 + ["error", "done", "result", "done", "done"]
    assert (events[3]["scenario"], events[3]["message"]) == ("prefill", "RuntimeError: broke")
    assert (events[5]["scenario"], events[5]["rates"]) == ("b1", [4.0, 4.0])


def test_a_worker_reports_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The orders ended before the last run of b1, and before any timed run of prefill."""
    events = obeyed(monkeypatch, tmp_path, [("prefill", 0), ("b1", 0), ("b1", 1)])
    assert [event["event"] for event in events] == ["done", "done", "done", "result"]
    assert (events[3]["scenario"], events[3]["rates"]) == ("b1", [4.0])


def test_prompts_differ_and_are_ids() -> None:
    made = prompts(20, 16, 100, seed=5)
    assert made == prompts(20, 16, 100, seed=5)
    assert len({tuple(prompt) for prompt in made}) == 20
    assert all(0 <= token < 100 for prompt in made for token in prompt)


def test_rates_by_hand() -> None:
    def scenario(figure: Figure) -> Scenario:
        return Scenario(id="x", figure=figure, requests=4, prompt=100, output=11, warm_requests=1, warm_output=1)

    assert rates(scenario(Figure.OUTPUT), [2.0, 4.0]) == [22.0, 11.0]
    assert rates(scenario(Figure.INPUT), [2.0]) == [200.0]
    # The first token of each request belongs to the prefill that is taken off.
    assert rates(scenario(Figure.DECODE), [3.0], [0.9, 1.1]) == [20.0]


def test_who_serves() -> None:
    assert objection("dsl", {"DSL": 32}) is None
    assert "served by {'DSL': 31, 'FLASH_ATTN': 1}" in str(objection("dsl", {"DSL": 31, "FLASH_ATTN": 1}))
    assert "served by nothing" in str(objection("dsl", {}))


def test_the_worker_says_what_vllm_chose() -> None:
    class Thing:
        def __init__(self, **fields: object) -> None:
            self.__dict__.update(fields)

    backend = Thing(get_name=lambda: "DSL")
    layers = {"0": Thing(get_attn_backend=lambda: backend), "1": Thing(), "2": Thing(get_attn_backend=lambda: backend)}
    worker = WorkerFacts()
    worker.vllm_config = Thing(
        compilation_config=Thing(static_forward_context=layers, cudagraph_mode=Thing(name="FULL")),
        scheduler_config=Thing(max_num_seqs=8, max_num_batched_tokens=64),
        cache_config=Thing(block_size=16, cache_dtype="auto"),
        parallel_config=Thing(world_size_across_dp=2),
    )
    facts = json.loads(json.dumps(worker.attention_facts()))
    assert facts["served_by"] == {"DSL": 2}
    assert facts["graphs"] == "FULL"
    assert facts["devices"] == 2


def test_options_of_the_server() -> None:
    assert children.flag("enable_prefix_caching", False) == ["--no-enable-prefix-caching"]
    assert children.flag("enforce_eager", True) == ["--enforce-eager"]
    assert children.flag("max_model_len", 64) == ["--max-model-len", "64"]
    assert children.flag("compilation_config", {"mode": 0}) == ["--compilation-config", '{"mode": 0}']


def test_what_vllm_tells() -> None:
    log = (
        "(EngineCore pid=1) INFO 01-01 [cuda.py:1] Using AttentionBackendEnum.FLASH_ATTN backend.\n"
        "INFO [x.py:2] dsl serves attention of 4/2 heads on sm_90a: attention.decode by triton\n"
        "INFO [x.py:2] dsl serves attention of 4/2 heads on sm_90a: attention.decode by triton\nINFO other\n"
        "INFO [__init__.py:3] Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod\n"
        "INFO [serve.py:4] dsl serves 32 fp8 linear layers (QKVParallelLinear), on sm_90a: by scaled-linear triton\n"
        "INFO [served_layers.py:5] vLLM serves 65 norms: the model is quantised\n"
    )
    assert children.startup_lines(log) == [
        "Using AttentionBackendEnum.FLASH_ATTN backend.",
        "dsl serves attention of 4/2 heads on sm_90a: attention.decode by triton",
        "Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod",
        "dsl serves 32 fp8 linear layers (QKVParallelLinear), on sm_90a: by scaled-linear triton",
        "vLLM serves 65 norms: the model is quantised",
    ]


def run_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, events: dict[str, list[children.Record]], scenarios: str = "b1"
) -> int:
    """The command with each backend's events given."""
    found = [(backend, event) for backend, of_backend in events.items() for event in of_backend]
    monkeypatch.setattr(command, "events_of", lambda *_: iter(found))
    arguments = ["--model", "tiny", "--backends", ",".join(events), "--scenarios", scenarios, "--commit", "abc"]
    return command.run(command.parse([*arguments, "--json", str(tmp_path / "out.jsonl")]))


def test_a_failed_backend_is_a_column_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = children.failure("asked for PEER, served by OTHER", "the log")
    peer = RESULT | {"rates": [50.0]}
    events = {
        "PEER": [failed],
        "dsl": [READY | {"startup_lines": []}, RESULT],
        "SLOW": [READY | {"startup_lines": []}, peer],
    }
    assert run_with(monkeypatch, tmp_path, events) == 1
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["environment", "error", "engine", "result", "engine", "result"]
    assert lines[0]["commit"] == "abc"
    assert {line["model"] for line in lines} == {"tiny"}
    assert (lines[3]["backend"], lines[3]["value"]) == ("dsl", 100.0)
    text = capsys.readouterr().out
    assert "PEER: engine: asked for PEER, served by OTHER" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0] == "|"]
    assert rows[0] == ["scenario", "unit", "PEER", "dsl", "SLOW"]
    assert rows[2] == ["b1", "output tokens/s", "error", "100.0", "50.0 (2.00x)"]
    assert rows[3] == ["start", "s", "error", "3", "3"]
    assert rows[4][0] == "ratio"
    assert rows[6] == ["2.000x", "tiny", "b1", "100.0", "50.0", "SLOW"]


def test_the_smallest_ratio_is_first() -> None:
    def column(backend: str, **values: float) -> command.Column:
        return command.Column(backend, values=values)

    columns = {
        "one": [column("dsl", b1=11.0, b16=9.0), column("PEER", b1=10.0, b16=10.0), column("OTHER", b1=22.0)],
        "two": [column("PEER", b1=10.0), column("dsl", b1=10.0, b64=1.0)],
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in command.ratios(columns).splitlines()[2:]]
    assert [(ratio, model, scenario, peer) for ratio, model, scenario, *_, peer in rows] == [
        ("0.500x", "one", "b1", "OTHER"),
        ("0.900x", "one", "b16", "PEER"),
        ("1.000x", "two", "b1", "PEER"),
        ("1.100x", "one", "b1", "PEER"),
    ]


def test_all_figures_are_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_with(monkeypatch, tmp_path, {"dsl": [READY | {"startup_lines": []}, RESULT]}) == 0


def test_a_failed_scenario_is_not_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = {"event": "error", "scenario": "b1", "message": "RuntimeError: broke"}
    assert run_with(monkeypatch, tmp_path, {"dsl": [READY | {"startup_lines": []}, error]}) == 1
    error = error | {"scenario": "prefill"}
    assert run_with(monkeypatch, tmp_path, {"dsl": [READY | {"startup_lines": []}, RESULT, error]}, "b1,prefill") == 1


def test_the_module_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "engine", "--model", "tiny", "--scenarios", "nothing"],
        capture_output=True,
        text=True,
        cwd=children.ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert "no scenario nothing" in done.stderr


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "tiny,llama-9b"]) == 2
    assert "no model llama-9b: choose from deepseek-v2-lite" in capsys.readouterr().err


@contextmanager
def stand_in_server(lines: list[str], status: int = 200) -> Iterator[str]:
    """An HTTP server that answers every completion with these lines; yields its URL."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["stream_options"] == {"include_usage": True}
            self.send_response(status)
            self.end_headers()
            self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PIECE = 'data: {"choices": [{"text": ""}]}'
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 2}}'
DONE = "data: [DONE]"


@pytest.mark.parametrize(
    ("lines", "status", "error"),
    [
        pytest.param([PIECE, PIECE, USAGE, DONE], 200, "", id="all is well"),
        pytest.param([PIECE, PIECE, USAGE], 200, "the stream ended early", id="cut off"),
        pytest.param([PIECE, PIECE, DONE], 200, "-1 tokens instead of 2", id="no usage"),
        pytest.param([PIECE, USAGE.replace("2", "1"), DONE], 200, "1 tokens instead of 2", id="too few"),
        pytest.param(['data: {"error": "engine died"}', DONE], 200, "in the stream: engine died", id="error inside"),
        pytest.param(["busy"], 503, "status 503: busy", id="refused"),
        pytest.param(["data: {"], 200, "JSONDecodeError", id="garbage"),
    ],
)
def test_what_counts_as_an_answer(lines: list[str], status: int, error: str) -> None:
    pytest.importorskip("aiohttp")
    with stand_in_server(lines, status) as url:
        outcome = load.send(url, [load.Request([1, 2], 2)] * 3)
    if error:
        assert outcome.failed == 3
        assert len(outcome.errors) == 1
        assert outcome.errors[0].startswith(error)
    else:
        assert (outcome.failed, outcome.errors) == (0, ())
        assert outcome.rate * outcome.seconds == pytest.approx(6)
        assert 0 < outcome.first_s <= outcome.seconds


def test_nobody_answers() -> None:
    pytest.importorskip("aiohttp")
    outcome = asyncio.run(load.send_all("http://127.0.0.1:1", [load.Request([1], 1)]))
    assert outcome.failed == 1
    assert "Cannot connect" in outcome.errors[0]


def test_mixed_lengths() -> None:
    requests = load.mixed(64, 4096, 512, 1000, seed=1)
    assert requests == load.mixed(64, 4096, 512, 1000, seed=1)
    lengths = [len(request.prompt) for request in requests]
    assert min(lengths) >= 4
    assert max(lengths) <= 4096
    assert len(set(lengths)) > 40
    assert all(1 <= request.output <= 512 for request in requests)


def test_no_prompt_begins_like_another(tmp_path: Path) -> None:
    """The prefix cache would have it already: b256 and sampled differ in nothing else."""
    chosen = [scenario for scenario in QUICK if scenario.id in ("b16", "b64", "b256", "sampled")]
    job = Job(backend="dsl", engine={}, scenarios=chosen, vocabulary=1000)
    found = [
        tuple(prompt[:16])
        for scenario in chosen
        for turn in range(3)
        for prompt in Measurement(None, scenario, job, Events(tmp_path / "events")).prompts(scenario.requests, turn)
    ]
    assert len(found) == len(set(found)) == 3 * (16 + 64 + 256 + 256)
