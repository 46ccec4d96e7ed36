# SPDX-License-Identifier: Apache-2.0
"""Kernels of others, unmodified, give the right values on the emulator, and its checks find nothing wrong in them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from peer_cases import SCHEDULES
from run_case import CASES, PEERS

HERE = Path(__file__).resolve().parent
LIMIT_S = 600
ALL = [
    pytest.param(arch, name, marks=() if arch in case.quick else pytest.mark.full, id=f"{name}-{arch}")
    for name, case in CASES.items()
    for arch in case.archs
]


@pytest.fixture(autouse=True)
def _peers_are_installed() -> None:
    if not (PEERS / ".set-up").is_file():
        pytest.skip(f"{PEERS} does not hold the kernels: `make peers` installs them")


@pytest.mark.parametrize(("arch", "name"), ALL)
def test_values_and_findings(arch: str, name: str) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "run_case.py"), arch, name, "--schedules", *SCHEDULES]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert list(report["schedules"]) == list(SCHEDULES)
    for schedule, told in report["schedules"].items():
        for output, verdict in told["outputs"].items():
            assert verdict["wrong"] == 0, f"{schedule}: {output}: {verdict}"
        assert told["findings"].keys() == set(CASES[name].known.get(arch, ())), (
            f"{schedule}: {told['findings']}: {told['errors']}"
        )
        assert told["instructions"] > 0, f"{schedule}: nothing was launched"


def test_every_case_says_what_it_is() -> None:
    """docs/emulator-thirdparty.md has the first line of it, and the rest where a case has findings of its own."""
    for name, case in CASES.items():
        first, *rest = (case.make.__doc__ or "").strip().splitlines()
        assert first, name
        assert rest or not case.known, name
