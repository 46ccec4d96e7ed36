# SPDX-License-Identifier: Apache-2.0
"""One HTML page of a comparison, with everything that it needs inside.

python -m loadtests.page results.jsonl page.html
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import document
from benchmarks.document import facts_line, labelled, table, text
from loadtests import charts
from loadtests.figures import PERCENTS, Ratio, milliseconds
from loadtests.results import COMPARED, PER_DEVICE, PER_USER, Cell, Record, Results, Value, gather, percentile_of, read
from loadtests.scenario import Scenario

LEGEND = (
    "Left: the number at a symbol is the level, bars go from the lowest round to the highest, the line joins what no "
    "other level beats; hollow: the client may be the limit. Right: symbol p50, line up to p90, dash p99; dots: limits."
)
DOUBT = "†"
FEW = 100  # requests below which a 99th percentile is little more than the slowest one
MEANING = {
    "tokens": "counted by the server (usage in the stream), at the moment they arrive; never guessed from pieces.",
    "tokens/s": "output tokens that arrived in the window, by its seconds and the devices that the server uses.",
    "tokens/s/user": "1000 over the median TPOT in ms: how fast an answer is written once it has begun.",
    "TTFT": "from when a request was sent (open loop: was due) to its first token.",
    "TPOT": "time from the first to the last token, by the tokens after the first; one value a request.",
    "ITL": "time between two pieces of a stream; many values a request.",
    "goodput": "share of the requests sent in the window that kept both limits; failed ones count as not.",
    "cached": "prompt tokens that the prefix cache answered, of all that were looked up, warm-up included.",
    "ratios": "median over rounds, each of two runs of the same round, and the lowest and highest. Above 1 dsl is "
    "better, for times too. Coloured where all of at least two rounds agree.",
    "whose requests": "times are of requests sent in the window; errors are of the whole load.",
}


def write(records: Sequence[Record], path: Path) -> None:
    document.write(render(records), path)


def render(records: Sequence[Record]) -> str:
    """The page.

    Args:
        records: the lines of results.jsonl, of a run that may not have ended.
    """
    results = gather(records)
    title = f"{results.environment['model']} on {results.environment['device']}"
    parts = [header(results), document.notes(complaints(results))]
    if results.ours and results.peers:
        parts.append(summary(results))
    parts += [section(results, scenario) for scenario in results.scenarios]
    parts.append(document.words(MEANING))
    return document.document(title, parts)


def header(results: Results) -> str:
    """What the figures were taken with."""
    facts = results.environment
    cores = f"{facts['cores']} cores"
    machine = ", ".join([facts["device"], *([f"driver {facts['driver']}"] if facts.get("driver") else []), cores])
    rounds = f"{facts['rounds']} round{'' if facts['rounds'] == 1 else 's'}"
    processes = f"{facts['processes']} process{'' if facts['processes'] == 1 else 'es'}"
    kind = "engines without servers" if facts["offline"] else f"client of up to {processes}"
    lines = [
        f"{machine}; {facts['date'].replace('T', ' ')}; {document.commit_of(facts)}; {rounds}, interleaved; {kind}; "
        f"seed {facts['seed']}",
        document.versions_of(facts),
    ]
    backends = ", ".join(results.backends)
    return (
        f"<h1>{text(facts['model'])} on {text(facts['device'])}</h1>"
        f"<p>Attention backends under the same load: {text(backends)}.</p>"
        + "".join(map(facts_line, lines))
        + f'<p class="facts"><code>{text(shlex.join(facts["command"]))}</code></p>'
        + f'<p class="facts">Every server: <code>{text(shlex.join(facts["flags"]) or "vLLM’s defaults")}</code></p>'
    )


def complaints(results: Results) -> list[str]:
    """What a reader has to know before believing a figure."""
    found = []
    if not results.environment["on_gpu"]:
        found.append("This ran on a CPU: it shows that serving works, and says nothing about speed on a GPU.")
    if results.environment["rounds"] < 2:
        found.append("One round: ratios have no spread, and no difference is shown to be one.")
    if results.end is None:
        found.append("The run has not ended, or was killed: rounds are missing.")
    elif results.end["reason"]:
        found.append(f"The run did not get to its end: {results.end['reason']}.")
    for record in results.failed:
        where = f"{record['backend']}, round {record['round'] + 1}"
        where += f", {record['scenario']}" if record["scenario"] else ""
        found.append(f"{where}: {record['message']}")
    for (scenario, level, backend), cell in results.cells.items():
        where = f"{backend}, {scenario}, {level.label}"
        details: dict[str, str] = {}
        for figures in cell.figures.values():
            details |= figures.get("details", {})
        found += [f"{where}: {count} requests: {kind} ({details[kind]})" for kind, count in cell.errors.items()]
        if any(figures.get("done") == 0 for figures in cell.figures.values()):
            found.append(f"{where}: no request that was sent in the window got its answer")
    return found + client_limits(results)


def client_limits(results: Results) -> list[str]:
    """One line, however many loads the client may have held up."""
    runs = [
        (f"{backend}, {scenario}, {level.label}", figures["client"])
        for (scenario, level, backend), cell in results.cells.items()
        for figures in cell.figures.values()
        if "client" in figures
    ]
    limited = [(where, client) for where, client in runs if client["limit"]]
    if not limited:
        return []
    where, worst = max(limited, key=lambda pair: pair[1]["late_ms"])
    of = f"{len(limited)} of {len(runs)} loads"
    return [f"In {of} the client, not the server, may be the limit; most in {where}: {worst['limit']}"]


def ratio_cell(found: Ratio | None, doubtful: bool) -> str:
    if found is None:
        return "<td>-</td>"
    spread = f"{found.low:.2f}–{found.high:.2f}" if found.rounds > 1 else "one round"
    verdict, mark = ("open", DOUBT) if doubtful else (found.verdict, "")
    return f'<td class="{verdict}">{found.median:.2f}×{mark} <span class="range">{spread}</span></td>'


def summary(results: Results) -> str:
    """Ours over every peer, at every level."""
    metrics = COMPARED[:1] if results.environment["offline"] else COMPARED
    names = "".join(f"<th>{text(metric.name)}</th>" for _ in results.peers for metric in metrics)
    peers = "".join(f'<th class="group" colspan="{len(metrics)}">over {text(peer)}</th>' for peer in results.peers)
    rows = []
    for scenario in results.scenarios:
        for index, level in enumerate(results.levels(scenario.name)):
            cells = "".join(
                ratio_cell(
                    results.ratio(scenario.name, level, peer, metric), results.doubtful(scenario.name, level, peer)
                )
                for peer in results.peers
                for metric in metrics
            )
            rows.append(labelled(scenario.name, level.label, index == 0) + cells + "</tr>")
    if not rows:
        return ""
    return (
        f"<h2>{text(results.ours)} beside the others</h2>"
        '<div class="scroll"><table class="ratios"><caption>Above 1 it is better, for times too: median over rounds, '
        f"then the lowest and the highest. Coloured where all rounds agree. {DOUBT} the client may be "
        "the limit.</caption>"
        f'<thead><tr><th class="group"></th><th class="group"></th>{peers}</tr>'
        f'<tr><th class="name">scenario</th><th class="name">load</th>{names}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def ratio_lines(records: Sequence[Record]) -> list[str]:
    """The summary for a terminal."""
    results = gather(records)
    metrics = COMPARED[:1] if results.environment["offline"] else COMPARED
    lines = []
    for scenario in results.scenarios:
        for level in results.levels(scenario.name):
            for peer in results.peers if results.ours else []:
                found = [(metric.name, results.ratio(scenario.name, level, peer, metric)) for metric in metrics]
                texts = [f"{name} {one.median:.2f}x ({one.low:.2f} to {one.high:.2f})" for name, one in found if one]
                doubt = "; THE CLIENT MAY BE THE LIMIT" * results.doubtful(scenario.name, level, peer)
                where = f"{scenario.name}, {level.label}: {results.ours} over {peer}"
                lines += [f"{where}: {', '.join(texts)}{doubt}"] if texts else []
    return lines


def describe(scenario: Scenario) -> str:
    """The parameters of a scenario in words."""
    vary = f" (the last {scenario.vary:.0%} drawn)" if scenario.vary else ""
    parts = [f"{scenario.prompt} tokens in, {scenario.output} out{vary}"]
    if scenario.shared_prefix:
        parts.append(f"{scenario.shared_prefix} of them shared within {scenario.groups} groups")
    else:
        parts.append("no two prompts alike")
    sampling = scenario.sampling.model_dump(exclude_defaults=True)
    parts.append(", ".join(f"{key} {value:g}" for key, value in sampling.items()) if sampling else "greedy")
    parts += ["prompts as text"] * scenario.text
    parts.append(f"{scenario.warm_s:g} s of warm-up, {scenario.window_s:g} s measured")
    return "; ".join(parts)


def section(results: Results, scenario: Scenario) -> str:
    head = f"<h2>{text(scenario.name)}</h2><p>{text(scenario.why)}</p>"
    if not results.levels(scenario.name):
        return f"{head}{facts_line(describe(scenario))}<p>No figures.</p>"
    if results.environment["offline"]:
        shape = f"{scenario.prompt} tokens in, {scenario.output} out; greedy; all requests handed over at once"
        figures = [charts.batch_chart(results, scenario)]
    else:
        shape = describe(scenario)
        figures = [
            charts.frontier_chart(results, scenario),
            charts.latency_chart(results, scenario, "ttft", "Time to first token", "ttft_ms"),
            charts.latency_chart(results, scenario, "tpot", "Time per output token", "tpot_ms"),
        ]
    legend = "" if results.environment["offline"] else facts_line(LEGEND)
    rows = offline_table(results, scenario) if results.environment["offline"] else served_table(results, scenario)
    return f"{head}{facts_line(shape)}{document.charts(figures)}{legend}{rows}"


def ranged(value: Value | None) -> str:
    if value is None:
        return "<td>-</td>"
    digits = 0 if value.median >= 1000 else 1
    spread = f' <span class="range">{value.low:.{digits}f}–{value.high:.{digits}f}</span>' if value.rounds > 1 else ""
    return f"<td>{value.median:.{digits}f}{spread}</td>"


def number(cell: Cell, name: str, percent: int, divisor: float = 1) -> str:
    value = cell.value(percentile_of(name, percent))
    return milliseconds(value.median / divisor if value else None)


def times(cell: Cell, name: str, divisor: float = 1) -> str:
    return f"<td>{' / '.join(number(cell, name, percent, divisor) for percent in PERCENTS)}</td>"


def share(cell: Cell, index: int) -> str:
    value = cell.value(lambda figures: figures["goodput"][index]["share"])
    return f"<td>{value.median:.0%}</td>" if value else "<td>-</td>"


def cached(cell: Cell) -> str:
    counts = [counted for counted in cell.server.values() if counted.get("queried")]
    if not counts:
        return "<td>-</td>"
    return f"<td>{sum(c['hits'] for c in counts) / sum(c['queried'] for c in counts):.0%}</td>"


def served_table(results: Results, scenario: Scenario) -> str:
    """All figures, a row for each level and backend."""
    limits = [f"goodput {one.name}, {one.ttft_ms:g}/{one.tpot_ms:g} ms" for one in scenario.limits]
    device = charts.device_word(results)
    heads = [f"tokens/s/{device}", PER_USER.name, "TTFT ms", "TPOT ms", "ITL p99 ms", "whole answer s", *limits]
    heads += ["cached", "preempted", "requests", "errors"]
    rows = []
    for level in results.levels(scenario.name):
        kept = [name for name in results.backends if (scenario.name, level, name) in results.cells]
        for backend in kept:
            cell = results.cells[scenario.name, level, backend]
            cells = [ranged(cell.value(PER_DEVICE.of)), ranged(cell.value(PER_USER.of))]
            cells += [times(cell, "ttft"), times(cell, "tpot")]
            cells += [f"<td>{number(cell, 'itl', 99)}</td>", times(cell, "e2e", 1000)]
            cells += [share(cell, index) for index in range(len(limits))]
            preempted = sum(counted.get("preemptions", 0) for counted in cell.server.values())
            few = "*" if cell.sent < FEW else ""
            errors = sum(cell.errors.values())
            cells += [cached(cell), f"<td>{preempted:.0f}</td>", f"<td>{cell.sent}{few}{DOUBT * cell.limited}</td>"]
            cells.append(f'<td class="{"worse" if errors else ""}">{errors}</td>')
            rows.append(labelled(level.label, backend, backend == kept[0]) + "".join(cells) + "</tr>")
    rounds = results.environment["rounds"]
    over = "One round" if rounds == 1 else f"Median of up to {rounds} rounds, then the lowest and the highest"
    caption = (
        f"{over}; times are p50 / p90 / p99. "
        f"* fewer than {FEW} requests in all windows: its p99 is little more than the slowest one. "
        f"{DOUBT} the client may be the limit."
    )
    return table(caption, ["load", "backend"], heads, rows)


def offline_table(results: Results, scenario: Scenario) -> str:
    rows = [
        labelled(level.label, backend, True) + ranged(cell.value(PER_DEVICE.of)) + "</tr>"
        for level in results.levels(scenario.name)
        for backend in results.backends
        if (cell := results.cells.get((scenario.name, level, backend)))
    ]
    caption = "Median of the rounds, then the lowest and the highest."
    return table(caption, ["batch", "backend"], [f"tokens/s/{charts.device_word(results)}"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.page", description="The page of a file of results.")
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    options: Any = parser.parse_args()
    try:
        write(read(options.results), options.page)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{options.results}: {error}") from None
    print(options.page)


if __name__ == "__main__":
    main()
