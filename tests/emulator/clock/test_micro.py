# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels on the clock: each gives back the constants that it is there to measure."""

import os
import time

import numpy as np
import pytest

from emulator.clock import measure
from emulator.clock.chips import CHIPS
from emulator.clock.machine import ClockMachine
from emulator.clock.micro import CHAIN_BYTES, LAUNCH_MICROS, MICROS, SHARED_BYTES, STEPS, chain
from emulator.errors import HostError
from emulator.host.launch import Launch, Parameter, Region

CHIP, ARCH = CHIPS["H200"], "sm_90a"


def aligned(words, bytes_):
    """Zeros whose first byte is at a multiple."""
    whole = np.zeros(words + bytes_ // 8, np.uint64)
    return whole[-(whole.ctypes.data // 8) % (bytes_ // 8) :][:words]


def clocked(text, *, ctas, threads, data, programmatic=False, launches=1):
    """The time of the last of some launches that write 16 bytes and read `data`."""
    out = np.zeros(2, np.uint64)
    machine = ClockMachine(ARCH, CHIP.sms)
    arrays = (("out", out), ("data", data))
    regions = [Region(name, a.ctypes.data, a.nbytes, "uint64", a) for name, a in arrays]
    machine.overlap(
        [
            Launch(
                kernel="micro",
                ptx=text,
                arch=ARCH,
                grid=(ctas, 1, 1),
                block=(threads, 1, 1),
                cluster=(ctas if ctas <= 8 else 1, 1, 1),
                programmatic=programmatic,
                shared_bytes=SHARED_BYTES,
                parameters=tuple(Parameter(name, 8, int(a.ctypes.data).to_bytes(8, "little")) for name, a in arrays),
                regions=tuple(sorted(regions, key=lambda region: region.address)),
            )
        ]
        * launches
    )
    assert [str(finding) for finding in machine.findings if not finding.warning] == []
    return machine.times[-1]


def cycles(micro, steps):
    if micro.cold:
        data = aligned(CHAIN_BYTES // 8, 32)
        data[:] = chain(data.ctypes.data)
    else:
        # So small that all but the first access find it in L2.
        data = aligned(micro.data_bytes // 8, 16)
    return clocked(micro.text(steps, ARCH), ctas=micro.ctas, threads=micro.threads, data=data).cycles


@pytest.mark.parametrize("micro", MICROS, ids=lambda micro: micro.name)
def test_a_step_takes_what_the_constants_say(micro):
    found = (cycles(micro, 2 * micro.steps) - cycles(micro, micro.steps)) / micro.steps
    assert found == pytest.approx(micro.expected(CHIP), rel=0.02, abs=1.5)


@pytest.mark.parametrize("micro", LAUNCH_MICROS, ids=lambda micro: micro.name)
def test_a_launch_takes_what_the_constants_say(micro):
    ctas, threads = measure.LAUNCHED

    def once(text):
        made = {"data": aligned(2, 16), "programmatic": micro.programmatic, "launches": 3}
        return clocked(text, ctas=ctas, threads=threads, **made).microseconds

    # Its first and last instructions take some cycles.
    assert micro.of(once, ARCH) == pytest.approx(micro.expected(CHIP), abs=0.05)


def test_a_chain_goes_through_the_whole_buffer():
    words = chain(1 << 20)
    assert len(words) == CHAIN_BYTES // 8
    seen, at = set(), 1 << 20
    for _ in range(2 * STEPS):
        at = words[(at - (1 << 20)) // 8]
        seen.add(at)
    assert len(seen) == 2 * STEPS
    assert max(seen) < (1 << 20) + CHAIN_BYTES


class Driver:
    """Calls of the driver, none of which does anything: clocks and times are 0."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        def call(*arguments):
            self.called.append((name, arguments))
            return 0

        return call


def test_every_micro_kernel_is_launched(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(measure.ctypes, "CDLL", lambda _: driver)
    gpu = measure.Gpu()
    shown = [measure.line(gpu, one, CHIP) for one in measure.micros(ARCH)]
    assert [line.split()[0] for line in shown] == [one.name for one in (*MICROS, *LAUNCH_MICROS)]
    launches = [arguments[0]._obj for name, arguments in driver.called if name == "cuLaunchKernelEx"]
    assert {(one.attributes[0].id, one.attributes[0].value[0]) for one in launches if one.count} == {
        (measure.CLUSTER, 1),
        (measure.CLUSTER, 2),
        (measure.PROGRAMMATIC, 1),
    }
    assert sum(one.grid[0] == measure.LAUNCHED[0] for one in launches) == 4 * 3 * measure.LAUNCHES
    flushed = [name for name, arguments in driver.called if name == "cuMemcpyHtoD_v2"]
    assert len(flushed) == 2 * measure.CALLS
    assert not any(one.name.startswith("wgmma") for one in measure.micros("sm_100a"))


class Faulty:
    """A GPU on which one micro-kernel hangs, one fails, and one ends the process."""

    name, arch = "a GPU", ARCH

    def cycles(self, micro, steps):
        if micro.name == "alu":
            time.sleep(60)
        if micro.name == "shared":
            raise HostError("cuCtxSynchronize returns 719 (CUresult)")
        if micro.name == "hbm":
            os._exit(1)
        return 7 * steps

    def launch_us(self, micro):
        return 1.0


def test_a_micro_kernel_that_hangs_or_fails_costs_no_other(monkeypatch):
    monkeypatch.setattr(measure, "Gpu", Faulty)
    shown = list(measure.lines("", CHIP, 0.5))
    assert shown[0].startswith("a GPU")
    assert [line.split()[0] for line in shown[1:]] == [one.name for one in (*MICROS, *LAUNCH_MICROS)]
    of = {line.split()[0]: line for line in shown[1:]}
    assert of.pop("alu").endswith("no answer within 0.5 s")
    assert of.pop("shared").endswith("719 (CUresult)")
    assert of.pop("hbm").endswith("the process ended")
    assert all(" cycles, " in line and " 7.00 " in line for line in list(of.values())[: -len(LAUNCH_MICROS)])
    assert [line.split()[0] for line in measure.lines("^fm|^launch", CHIP, 0.5)][1:] == ["fma", "launch"]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    def missing():
        raise HostError("there is no driver here")

    monkeypatch.setattr(measure, "Gpu", missing)
    monkeypatch.setattr("sys.argv", ["measure"])
    assert measure.main() == 2
    assert "no driver" in capsys.readouterr().err
