# SPDX-License-Identifier: Apache-2.0
"""The counter of compilations: phases, what is logged, threads."""

import logging
import threading

import pytest

from dsl_backend.runtime.compiles import Compiles, Phase, Source


def test_phases() -> None:
    counter, over = Compiles(), [False]
    counter.watch(lambda: over[0])
    counter.record("a", "1", Source.COMPILER, 1.0, 10)
    counter.record("a", "1", Source.DISK, 1.0, 10)
    over[0] = True
    assert counter.phase is Phase.SERVING
    counter.record("b", "2", Source.COMPILER, 1.0, 10)
    counter.record("c", "3", Source.COMPILER, 1.0, 10)
    counter.record("d", "4", Source.DISK, 1.0, 10)
    assert (counter.during_warmup, counter.after_warmup, counter.loads_after_warmup) == (1, 2, 1)
    counter.begin_warmup()
    assert counter.phase is Phase.WARM_UP
    counter.end_warmup()
    assert counter.phase is Phase.SERVING
    counter.clear()
    assert (counter.events, counter.phase) == ((), Phase.WARM_UP)


def test_only_what_makes_requests_wait_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    counter = Compiles()
    with caplog.at_level(logging.DEBUG, logger="vllm.dsl_backend"):
        counter.record("Scale K() for sm_90a", "0123", Source.COMPILER, 0.5, 10)
        counter.end_warmup()
        counter.record("Scale K() for sm_90a", "0123", Source.COMPILER, 0.5, 10)
        counter.record("Scale K() for sm_90a", "0123", Source.DISK, 0.002, 10)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert caplog.records[1].message.startswith("compiled Scale K() for sm_90a in 500 ms after warm-up (key 0123)")
    assert caplog.records[2].message.startswith("loaded Scale K() for sm_90a in 2 ms after warm-up")


def test_threads() -> None:
    counter = Compiles()

    def work() -> None:
        for _ in range(1000):
            counter.record("a", "1", Source.COMPILER, 0.0, 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.during_warmup == 4000
