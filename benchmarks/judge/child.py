# SPDX-License-Identifier: Apache-2.0
"""The candidate's process, which the judge starts: `python -m benchmarks.judge.child REQUESTS REPLIES BLOCK GPU_BYTES`.

Each line of the pipe REQUESTS is a JSON object with `do` and arguments; each answer is one on a line of REPLIES.
"""

import contextlib
import json
import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from dsl_backend import providers
from dsl_backend.providers import Launch, Provider

from ..runner import short_message
from .registry import judged
from .shared import opened
from .watch import Watch

SMS = 4
MOST_FINDINGS = 8
# Of the stream that is current on a machine without a GPU: the default one, by its three names in CUDA.
CURRENT_HANDLES = {0, 1, 2}
# As they were before a candidate could replace them.
CURRENT_STREAM, SYNCHRONIZE = torch.cuda.current_stream, torch.cuda.Stream.synchronize
CUDA_GRAPH, CAPTURING, ZEROS = torch.cuda.CUDAGraph, torch.cuda.graph, torch.zeros


class Recorder:
    """An emulated machine, and which bytes of the outputs its kernels wrote last."""

    def __init__(self, machine: Any, outputs: Sequence[torch.Tensor]) -> None:
        self.machine, self.outputs = machine, outputs
        self.other_streams: set[int] = set()
        self.seen = self.bits()
        self.by_kernel = [torch.zeros_like(one) for one in self.seen]
        self.by_host = [torch.zeros_like(one) for one in self.seen]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def bits(self) -> list[torch.Tensor]:
        return [out.contiguous().view(torch.uint8).clone() for out in self.outputs]

    def account(self, mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        """What changed since the last time goes to `mine`, and is no longer the others'."""
        now = self.bits()
        for was, new, one, other in zip(self.seen, now, mine, others, strict=True):
            changed = was != new
            one[changed], other[changed] = 1, 0
        self.seen = now

    def begin(self) -> None:
        """What the judge wrote is nobody's."""
        self.seen = self.bits()

    def launch(self, launch: Any) -> None:
        self.overlap([launch])

    def overlap(self, launches: Sequence[Any]) -> None:
        # The machine runs all launches in their order, so that this alone tells.
        self.other_streams |= {launch.stream for launch in launches} - CURRENT_HANDLES
        self.account(self.by_host, self.by_kernel)
        if len(launches) == 1:
            self.machine.launch(launches[0])
        else:
            self.machine.overlap(launches)
        self.account(self.by_kernel, self.by_host)

    def host_share(self) -> float:
        """The share of the written bytes that the host wrote last."""
        host, kernel = (sum(int(one.sum()) for one in masks) for masks in (self.by_host, self.by_kernel))
        return host / max(host + kernel, 1)


def captured(launch: Callable[[], object]) -> Any:
    """A CUDA graph of what is launched."""
    graph = CUDA_GRAPH()
    with CAPTURING(graph):
        launch()
    return graph


class Candidate:
    """A provider and the case that it is at. The methods without a leading underscore are the requests."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._stack = contextlib.ExitStack()
        self._launch: Launch | None = None
        self._device: Any = None
        self._recorder: Recorder | None = None
        self._graph: Any = None
        self._empty_graph: Any = None

    def load(self, op: str, file: str) -> dict[str, Any]:
        """Imports the candidate's file."""
        self._judged = judged(op)
        found = [one for one in providers.load(pathlib.Path(file)) if one.operator == op]
        if len(found) != 1:
            raise ValueError(f"it has {len(found)} providers of {op}: one is judged")
        return self._use(found[0])

    def load_named(self, op: str, name: str) -> dict[str, Any]:
        """Takes a provider of the benchmarks themselves."""
        from ..command import operators

        (found,) = (one for one in operators()[op].providers([]) if one.name == name)
        return self._use(found)

    def _use(self, provider: Provider) -> dict[str, Any]:
        self._provider = provider
        return {"name": provider.name, "source": provider.source}

    def case(self, payload: str, device: str, arch: str | None, schedule: str, seed: int) -> dict[str, Any]:
        """Prepares the provider for a problem and its inputs.

        Args:
            payload: a file, see `shared.opened`.
            device: of the tensors.
            arch: of the emulated device that runs the launches; None for the device of the tensors.
        """
        problem, memory = pickle.loads(pathlib.Path(payload).read_bytes())
        inputs = opened(memory)
        if reasons := list(self._provider.objections(problem)):
            return {"objections": reasons}
        if arch is not None:
            import emulator
            from emulator.host.device import default_machine

            machine = default_machine(arch, SMS, schedule, seed)
            outputs = self._judged.outputs(inputs)
            further = [out for layer in range(len(outputs)) for out in self._judged.further(inputs, layer)]
            self._recorder = Recorder(machine, [*outputs, *further])
            emulated = emulator.device(
                arch, sms=SMS, schedule=schedule, seed=seed, keep_findings=True, machine=self._recorder
            )
            self._device = self._stack.enter_context(emulated)
        self._on_gpu = device == "cuda"
        self._launch = self._provider.prepare(problem, inputs)
        return {"objections": []}

    def run(self, layers: Sequence[int]) -> dict[str, Any]:
        """Launches on layers, and waits for the current stream alone: work elsewhere is not waited for."""
        if self._recorder is not None:
            self._recorder.begin()
        self._launch_on(layers)
        self._wait()
        if self._recorder is not None:
            self._recorder.account(self._recorder.by_host, self._recorder.by_kernel)
        return {}

    def capture(self, layers: int) -> dict[str, Any]:
        """Gets ready for `replay`: CUDA graphs of all layers, and of a number that is set, on a GPU."""
        self.run(range(layers))
        self._layers = range(layers)
        if self._on_gpu:
            self._empty_graph = captured(partial(ZEROS, 1, device="cuda"))
            self._graph = captured(partial(self._launch_on, self._layers))
        return {}

    def _launch_on(self, layers: Sequence[int]) -> None:
        assert self._launch is not None
        for layer in layers:
            self._launch.run(layer)

    def replay(self, empty: bool = False) -> dict[str, Any]:
        """Launches once on each layer. empty: sets a number, which shows what the request itself costs.

        The first request behind those of the judge also has the GPU change from its process to this one.
        """
        graph = self._empty_graph if empty else self._graph
        if graph is not None:
            graph.replay()
        elif not empty:
            return self.run(self._layers)
        self._wait()
        return {}

    def _wait(self) -> None:
        if self._on_gpu:
            SYNCHRONIZE(CURRENT_STREAM())

    def end(self) -> dict[str, Any]:
        """Leaves the case; returns what the emulator found."""
        self._launch, self._graph, self._empty_graph = None, None, None
        device, self._device = self._device, None
        recorder, self._recorder = self._recorder, None
        # Closes the emulated device, whose checks at the exit are among the findings.
        self._stack.close()
        if device is None or recorder is None:
            return {"errors": []}
        errors = [str(one) for one in device.errors][:MOST_FINDINGS]
        if recorder.other_streams:
            handles = ", ".join(hex(one) for one in sorted(recorder.other_streams))
            errors.append(f"a kernel was launched on another stream than the current one: {handles}")
        return {"errors": errors, "launches": device.launches, "host_share": recorder.host_share()}

    def findings(self) -> dict[str, Any]:
        return {"findings": self._watch.findings()}


def limit_gpu(most: int) -> None:
    """Lets torch's allocator take at most so many bytes. The judge's process sees what is taken without it."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))


def main() -> None:
    requests, replies, block = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "block"
    if gpu_bytes := int(sys.argv[4]):
        limit_gpu(gpu_bytes)
    candidate = Candidate(Watch(block))
    with os.fdopen(requests) as lines:
        for line in lines:
            request = json.loads(line)
            ticket = request.pop("ticket")
            try:
                answer = getattr(candidate, request.pop("do"))(**request)
            except Exception as error:  # a candidate may raise anything
                answer = {"error": short_message(error)}
            os.write(replies, (json.dumps({"ticket": ticket, **answer}) + "\n").encode())


if __name__ == "__main__":
    main()
