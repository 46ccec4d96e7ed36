# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels on the clock: each gives back the constants that it is there to measure."""

import numpy as np
import pytest

from emulator.clock import measure
from emulator.clock.chips import CHIPS
from emulator.clock.machine import ClockMachine
from emulator.clock.micro import MICROS, STEPS
from emulator.errors import HostError
from emulator.host.launch import Launch, Parameter, Region

CHIP, ARCH = CHIPS["H200"], "sm_90a"


def cycles(micro, steps):
    out, data = np.zeros(2, np.uint64), np.zeros(512, np.uint64)
    # So small that all but the first access find it in L2.
    data = data[-(data.ctypes.data // 8) % 2 :][:2]
    machine = ClockMachine(ARCH, CHIP.sms)
    regions = [Region(name, a.ctypes.data, a.nbytes, "uint64", a) for name, a in (("out", out), ("data", data))]
    machine.launch(
        Launch(
            kernel="micro",
            ptx=micro.text(steps, ARCH),
            arch=ARCH,
            grid=(1, 1, 1),
            block=(micro.threads, 1, 1),
            shared_bytes=measure.SHARED_BYTES,
            parameters=tuple(
                Parameter(name, 8, int(a.ctypes.data).to_bytes(8, "little"))
                for name, a in (("out", out), ("data", data))
            ),
            regions=tuple(sorted(regions, key=lambda region: region.address)),
        )
    )
    assert [str(finding) for finding in machine.findings if not finding.warning] == []
    return machine.times[0].cycles


@pytest.mark.parametrize("micro", MICROS, ids=lambda micro: micro.name)
def test_a_step_takes_what_the_constants_say(micro):
    found = (cycles(micro, 2 * STEPS) - cycles(micro, STEPS)) / STEPS
    assert found == pytest.approx(micro.expected(CHIP), rel=0.05, abs=1.5)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    def missing():
        raise HostError("there is no driver here")

    monkeypatch.setattr(measure, "Gpu", missing)
    monkeypatch.setattr("sys.argv", ["measure"])
    assert measure.main() == 2
    assert "no driver" in capsys.readouterr().err
