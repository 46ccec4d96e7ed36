# SPDX-License-Identifier: Apache-2.0
"""Writes one self-contained HTML page of a comparison.

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
from loadtests.results import (
    COMPARED,
    INPUT,
    PER_DEVICE,
    PER_USER,
    REQUESTS,
    Cell,
    Record,
    Results,
    Value,
    gather,
    percentile_of,
    read,
)
from loadtests.scenario import Scenario

LEGEND = (
    "Throughput over speed for a user: the number at a symbol is the level, error bars go from the lowest round to "
    "the highest, the line is the Pareto front. Times: symbol p50, line up to p90, dash p99; dots: limits; "
    "hollow: the client was the limit. Distributions: the menu of a chart selects the level."
)
DOUBT = "†"
DISTRIBUTIONS = {
    "ttft": "Distribution of TTFT",
    "tpot": "Distribution of TPOT",
    "itl": "Distribution of ITL",
    "e2e": "Distribution of the time of whole answers",
}
FEW = 100  # with fewer requests p99 is almost the slowest request
MEANING = {
    "tokens": "as the server counts them (usage in the stream), at the time they arrive; not estimated from chunks.",
    "requests/s": "complete answers that ended in the window, divided by its seconds.",
    "input tokens/s": "prompt tokens of the answers that began in the window, divided by its seconds.",
    "tokens/s": "output tokens that arrived in the window, divided by its seconds and by the server's devices.",
    "tokens/s/user": "1000 divided by the median TPOT in ms: the speed of an answer after its first token.",
    "TTFT": "time from sending a request (open loop: from when it was due) to its first token.",
    "TPOT": "time from the first to the last token, divided by the tokens after the first; one value for each request. "
    "There is none if the client was the limit, or if tokens came in bursts.",
    "ITL": "time between two chunks of a stream; many values for each request.",
    "goodput": "share of the requests sent in the window that met both limits; failed requests did not meet them.",
    "cached": "share of looked-up prompt tokens that the prefix cache had, including the warm-up.",
    "ratios": "median over rounds, each of two runs of the same round, and the lowest and highest. Above 1 dsl is "
    "better, for times too. Coloured if all of at least two rounds agree.",
    "requests": "times are of requests sent in the window; errors are of the whole load.",
}


def write(records: Sequence[Record], path: Path) -> None:
    document.write(render(records), path)


def render(records: Sequence[Record]) -> str:
    """The page.

    Args:
        records: the lines of results.jsonl; the run need not have ended.
    """
    results = gather(records)
    title = title_of(results.environment)
    parts = [header(results), document.notes(complaints(results))]
    if results.ours and results.peers:
        parts.append(summary(results))
    parts += [section(results, scenario) for scenario in results.scenarios]
    parts.append(document.words(MEANING))
    return document.document(title, parts)


def title_of(facts: Record) -> str:
    return (
        f"Servers that already ran: {facts['model']}" if facts.get("urls") else f"{facts['model']} on {facts['device']}"
    )


def every_server(facts: Record) -> str:
    """The flags of started servers, or the addresses of servers that already ran."""
    if facts.get("urls"):
        return "; ".join(f"{name}: {url}" for name, url in facts["urls"].items())
    return shlex.join(facts["flags"]) or "vLLM’s defaults"


def header(results: Results) -> str:
    """The facts that the results depend on."""
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
        f"<h1>{text(title_of(facts))}</h1>"
        f"<p>Attention backends under the same load: {text(backends)}.</p>"
        + "".join(map(facts_line, lines))
        + f'<p class="facts"><code>{text(shlex.join(facts["command"]))}</code></p>'
        + f'<p class="facts">{"Servers" if facts.get("urls") else "Every server"}: '
        f"<code>{text(every_server(facts))}</code></p>"
    )


def complaints(results: Results) -> list[str]:
    """Warnings about the results."""
    found = []
    if results.environment.get("urls"):
        found.append("The servers already ran: their devices, flags and backends were not checked.")
    elif not results.environment["on_gpu"]:
        found.append("This ran on a CPU: it shows that serving works, and says nothing about speed on a GPU.")
    if results.environment["rounds"] < 2:
        found.append("One round: ratios have no spread, so no difference is significant.")
    if results.end is None:
        found.append("The run has not ended, or was killed: rounds are missing.")
    elif results.end["reason"]:
        found.append(f"The run ended early: {results.end['reason']}.")
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
            found.append(f"{where}: no request that was sent in the window was answered")
    return found + client_limits(results)


def client_limits(results: Results) -> list[str]:
    """Warnings about latencies that the client could not resolve: one for all loads that it limited, and one for
    each other load.
    """
    runs = [
        (f"{backend}, {scenario}, {level.label}", figures["client"])
        for (scenario, level, backend), cell in results.cells.items()
        for figures in cell.figures.values()
        if "client" in figures
    ]
    limited = [(where, client) for where, client in runs if client["limit"]]
    found = []
    if limited:
        where, worst = max(limited, key=lambda pair: pair[1]["late_ms"])
        of = f"{len(limited)} of {len(runs)} loads"
        found.append(
            f"In {of} the client, not the server, was the limit: they have no TPOT, no tokens/s/user, no goodput and "
            f"no ratio. Worst in {where}: {worst['limit']}. Give the client cores of its own, or more --processes"
        )
    for (scenario, level, backend), cell in results.cells.items():
        reasons: dict[str, list[str]] = {}
        for name, why in cell.unresolved.items() if not cell.limited else ():
            reasons.setdefault(why, []).append(name.upper())
        found += [f"{backend}, {scenario}, {level.label}: no {', '.join(n)}: {why}" for why, n in reasons.items()]
    return found


def ratio_cell(found: Ratio | None, doubtful: bool) -> str:
    if found is None:
        return f"<td>{'client limited' if doubtful else '-'}</td>"
    spread = f"{found.low:.2f}–{found.high:.2f}" if found.rounds > 1 else "one round"
    return f'<td class="{found.verdict}">{found.median:.2f}× <span class="range">{spread}</span></td>'


def summary(results: Results) -> str:
    """The ratios of dsl and every peer, at every level."""
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
    labels = ["scenario", "load", *(f"{metric.name} over {peer}" for peer in results.peers for metric in metrics)]
    return (
        f"<h2>{text(results.ours)} and the others</h2>"
        '<div class="scroll"><table class="ratios"><caption>Above 1 it is better, for times too: median over rounds, '
        "then the lowest and the highest. Coloured if all rounds agree. A round in which the client was the limit "
        "gives none.</caption>"
        f'<thead><tr><th class="group"></th><th class="group"></th>{peers}</tr>'
        f'<tr><th class="name">scenario</th><th class="name">load</th>{names}</tr></thead>'
        f"<tbody>{''.join(document.cards(rows, labels))}</tbody></table></div>"
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
                where = f"{scenario.name}, {level.label}: {results.ours} over {peer}"
                if not texts and results.doubtful(scenario.name, level, peer):
                    texts = ["no ratio, the client was the limit"]
                lines += [f"{where}: {', '.join(texts)}"] if texts else []
    return lines


def describe(scenario: Scenario) -> str:
    """The parameters of a scenario as text."""
    vary = f" (the last {scenario.vary:.0%} drawn)" if scenario.vary else ""
    parts = [f"{scenario.prompt} tokens in, {scenario.output} out{vary}"]
    if scenario.shared_prefix:
        parts.append(f"{scenario.shared_prefix} of them shared within {scenario.groups} groups")
    else:
        parts.append("all prompts differ")
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
        shape = f"{scenario.prompt} tokens in, {scenario.output} out; greedy; all requests submitted at once"
        figures = [charts.batch_chart(results, scenario)]
    else:
        shape = describe(scenario)
        figures = [
            charts.frontier_chart(results, scenario),
            charts.latency_chart(results, scenario, "ttft", "Time to first token", "ttft_ms"),
            charts.latency_chart(results, scenario, "tpot", "Time per output token", "tpot_ms"),
            charts.rate_chart(results, scenario, REQUESTS),
            charts.rate_chart(results, scenario, INPUT),
            *(charts.distribution_chart(results, scenario, name, title) for name, title in DISTRIBUTIONS.items()),
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
    """All figures in tables, with a row for each level and backend."""
    limits = [f"goodput {one.name}, {one.ttft_ms:g}/{one.tpot_ms:g} ms" for one in scenario.limits]
    device = charts.device_word(results)
    rates: list[str] = []
    spans: list[str] = []
    counts: list[str] = []
    for level in results.levels(scenario.name):
        kept = [name for name in results.backends if (scenario.name, level, name) in results.cells]
        for backend in kept:
            cell = results.cells[scenario.name, level, backend]
            start = labelled(level.label, f"{backend}{DOUBT * cell.limited}", backend == kept[0])
            metrics = (REQUESTS, PER_DEVICE, INPUT, PER_USER)
            rates.append(start + "".join(ranged(cell.value(metric.of)) for metric in metrics) + "</tr>")
            cells = [times(cell, name) for name in ("ttft", "tpot", "itl")] + [times(cell, "e2e", 1000)]
            spans.append(start + "".join(cells) + "</tr>")
            counts.append(start + counts_of(cell, len(limits)) + "</tr>")
    rounds = results.environment["rounds"]
    over = "One round" if rounds == 1 else f"Median of up to {rounds} rounds, then the lowest and the highest"
    doubt = f"{DOUBT} the client was the limit: rates are lower bounds, times are upper bounds."
    few = f"* fewer than {FEW} requests in all windows: p99 is almost the slowest request."
    names = ["load", "backend"]
    heads = [REQUESTS.name, f"tokens/s/{device}", INPUT.name, PER_USER.name]
    return "".join(
        (
            table(f"Rates. {over}. {doubt}", names, heads, rates),
            table(
                f"Times: p50 / p90 / p99. {doubt}",
                names,
                ["TTFT ms", "TPOT ms", "ITL ms", "whole answer s"],
                spans,
            ),
            table(f"Requests. {few}", names, [*limits, "cached", "preempted", "requests", "errors"], counts),
        )
    )


def counts_of(cell: Cell, limits: int) -> str:
    preempted = sum(counted.get("preemptions", 0) for counted in cell.server.values())
    errors = sum(cell.errors.values())
    return "".join(
        (
            *(share(cell, index) for index in range(limits)),
            cached(cell),
            f"<td>{preempted:.0f}</td>",
            f"<td>{cell.sent}{'*' if cell.sent < FEW else ''}</td>",
            f'<td class="{"worse" if errors else ""}">{errors}</td>',
        )
    )


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
    parser = argparse.ArgumentParser(prog="python -m loadtests.page", description="Make the page of a file of results.")
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
