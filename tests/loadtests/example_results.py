# SPDX-License-Identifier: Apache-2.0
"""Lines of a comparison that nobody ran: figures that are known, for statistics and pages."""

from typing import Any

from loadtests.scenario import load

Record = dict[str, Any]
BACKENDS = ("dsl", "FLASH_ATTN", "TRITON_ATTN")
SPEED = {"dsl": 1.1, "FLASH_ATTN": 1.0, "TRITON_ATTN": 0.8}
DRIFT = (1.0, 1.02, 0.97)  # of the machine, from round to round: it meets all backends alike


def environment(**changes: object) -> Record:
    facts: Record = {
        "kind": "environment",
        "date": "2026-01-02T03:04:05+00:00",
        "device": "NVIDIA Example",
        "driver": "580.1",
        "commit": "0123456789abcdef",
        "modified": False,
        "versions": {"torch": "2.11.0", "vllm": "0.26.0", "quack-kernels": None},
        "on_gpu": True,
        "cores": 16,
        "command": ["python", "-m", "loadtests.compare", "--model", "llama-8b"],
        "model": "llama-8b",
        "backends": list(BACKENDS),
        "rounds": 3,
        "processes": 8,
        "seed": 0,
        "flags": ["--max-model-len", "4096"],
        "offline": False,
        "scenarios": [load(name).model_dump() for name in ("1k-1k", "chat-shared-prefix")],
    }
    return facts | changes


def spread(value: float, n: int = 120) -> Record:
    return {"n": n, "mean": 1.1 * value, "p50": value, "p90": 1.4 * value, "p99": 2.2 * value}


def run(backend: str, scenario: str, users: int, rate: float, number: int, **changes: object) -> Record:
    """A run whose rates grow with the backend's speed, and whose times shrink with it."""
    speed = SPEED[backend] * DRIFT[number]
    pressed = users or 8 * rate
    tpot = (7 + 0.11 * pressed) / speed
    figures: Record = {
        "window_s": 60.0,
        "sent": 120,
        "done": 120,
        "requests_per_s": pressed / tpot,
        "output_per_s": 1000 * pressed / tpot,
        "input_per_s": 800 * pressed / tpot,
        "ttft": spread((30 + 2.5 * pressed) / speed),
        "tpot": spread(tpot),
        "itl": spread(tpot, 9000),
        "e2e": spread(1000 * tpot),
        "histograms": {name: {"20": 40, "21": 60, "25": 20} for name in ("ttft", "tpot", "itl", "e2e")},
        "unresolved": {},
        "per_user": 1000 / tpot,
        "goodput": [
            {"name": "server", "ttft_ms": 2000, "tpot_ms": 200, "per_s": 2.0, "share": 1.0},
            {"name": "interactive", "ttft_ms": 450, "tpot_ms": 40, "per_s": 1.5, "share": 0.75},
        ],
        "errors": {},
        "details": {},
        "client": {"processes": 8, "busy": 0.3, "late_ms": 0.6, "limit": ""},
        "all_sent": 140,
        "all_tokens": 140000,
    }
    return {
        "kind": "run",
        "mode": "serve",
        "backend": backend,
        "round": number,
        "scenario": scenario,
        "level": {"users": users, "rate": rate},
        "devices": 1,
        "figures": figures | changes,
        "server": {"queried": 1000.0, "hits": 900.0 if "prefix" in scenario else 0.0, "preemptions": 0.0},
    }


def records() -> list[Record]:
    """A run of three rounds that got to its end."""
    lines = [environment()]
    for number in range(3):
        for backend in BACKENDS:
            for name in ("1k-1k", "chat-shared-prefix"):
                lines += [run(backend, name, level.users, level.rate, number) for level in load(name).levels]
    return [*lines, {"kind": "end", "status": 0, "reason": ""}]
