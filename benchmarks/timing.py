# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a launch: with CUDA graph replays between events, or with a wall clock without a GPU."""

import pathlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import filelock
import torch
from dsl_backend.providers import Launch

L2_BYTES_UNKNOWN = 64 << 20  # used if torch does not report the size
# If the layers' data is three times the cache's size, a layer's data is evicted before its next launch.
L2_MULTIPLE = 3
MOST_LAYERS = 64
# A replay of at least this length makes the events' own cost (a few microseconds) negligible.
REPLAY_US = 1500.0
MOST_LAUNCHES = 512
# Launches that measure the host's time: enough for a median, and few enough not to fill the device's queue.
HOST_LAUNCHES = 100
HOST_SECONDS = 0.1


def alone() -> filelock.BaseFileLock:
    """A lock on this machine's GPUs: concurrent sweeps may compile at the same time, but they time one by one."""
    return filelock.FileLock(pathlib.Path(tempfile.gettempdir()) / "dsl-backend-timing.lock")


@dataclass(frozen=True)
class Summary:
    """A launch's time in microseconds: median, p10 and p90 of the samples."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


def summarize(samples: Sequence[float]) -> Summary:
    ordered = sorted(samples)

    def quantile(q: float) -> float:
        position = q * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return Summary(quantile(0.5), quantile(0.1), quantile(0.9), len(ordered))


class Timer(Protocol):
    """Times the launches of a prepared provider.

    Attributes:
        results: for each layer, the result of its launch after a sample.
    """

    results: list[torch.Tensor]

    def sample(self) -> float:
        """The mean microseconds of a launch, over one or several passes of all layers."""
        ...


class WallTimer:
    """Times launches with a wall clock, on a host without a GPU."""

    def __init__(self, launch: Launch, layers: int) -> None:
        self.launch, self.layers = launch, layers
        self.results: list[torch.Tensor] = []

    def sample(self) -> float:
        start = time.perf_counter()
        results = [self.launch.run(layer) for layer in range(self.layers)]
        self.results = results
        return 1e6 * (time.perf_counter() - start) / self.layers


class GraphTimer:
    """Replays a CUDA graph of launches that cycles through the layers.

    Each layer is in the graph equally often. As in the graph of a served model, kernels run back to back, and the gaps
    between them are part of the time. A provider that allocates its outputs has as many as there are layers, and one
    more: a single one that each launch frees would stay in the cache, and its bytes would never reach the memory.
    """

    def __init__(self, launch: Launch, layers: int, flush: torch.Tensor | None = None) -> None:
        self.launch, self.layers, self.flush = launch, layers, flush
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.results: list[torch.Tensor] = []
        self._capture(layers)
        estimate = min(self.sample() for _ in range(2))
        rounds = min(int(REPLAY_US / max(estimate * layers, 1e-3)), MOST_LAUNCHES // layers)
        if rounds > 1:
            self._capture(rounds * layers)

    def _capture(self, launches: int) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.launches = launches
        self.results = []
        with torch.cuda.graph(self.graph):
            for index in range(launches):
                result = self.launch.run(index % self.layers)
                if index < self.layers:
                    self.results.append(result)
                else:
                    self.results[index % self.layers] = result

    def sample(self) -> float:
        if self.flush is not None:
            self.flush.zero_()
        self._begin.record()
        self.graph.replay()
        self._end.record()
        self._end.synchronize()
        return 1e3 * self._begin.elapsed_time(self._end) / self.launches


def launch_us(launch: Launch, layers: int, device: torch.device) -> float:
    """Median microseconds until a launch without a graph returns to the host. The device's queue never fills up."""
    samples = []
    synchronize(device)
    began = time.perf_counter()
    for index in range(HOST_LAUNCHES):
        start = time.perf_counter()
        launch.run(index % layers)
        end = time.perf_counter()
        samples.append(1e6 * (end - start))
        if end - began > HOST_SECONDS:
            break
    synchronize(device)
    return summarize(samples).median_us


def l2_bytes(device: torch.device) -> int:
    """The size of the device's last-level cache; 0 for a CPU, whose times are not meaningful."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or L2_BYTES_UNKNOWN


def layers_needed(traffic_bytes: int, cache_bytes: int, moved_bytes: int = 0, most: int = MOST_LAYERS) -> int:
    """The number of layers that together exceed the cache and move so many bytes: at least 1, at most `most`."""
    asked = max(L2_MULTIPLE * cache_bytes, moved_bytes)
    return max(1, min(most, -(-asked // max(traffic_bytes, 1))))


def make_timer(launch: Launch, layers: int, device: torch.device, flush: bool = False) -> Timer:
    """The device's timer for a launch that already ran once on every layer.

    Args:
        flush: also overwrite the cache before each sample.
    """
    if device.type != "cuda":
        return WallTimer(launch, layers)
    scratch = torch.empty(L2_MULTIPLE * l2_bytes(device), dtype=torch.uint8, device=device) if flush else None
    return GraphTimer(launch, layers, scratch)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
