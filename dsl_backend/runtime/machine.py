# SPDX-License-Identifier: Apache-2.0
"""The cores and memory that this process may use, within its container's limits."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def cores() -> int:
    """The number of cores that this process may use: its affinity, limited by its container's quota."""
    count = len(os.sched_getaffinity(0))
    words = text_of(CGROUP / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        count = min(count, max(1, int(words[0]) // int(words[1])))
    return count


def available_bytes() -> int:
    """Bytes that can be allocated without swapping: of the machine, limited by what its container has left."""
    lines = (line.split() for line in text_of(MEMINFO).splitlines())
    machine = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), 1 << 62)
    limit, used = (text_of(CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return machine
    # Pages of files that were read, such as weights, count as used but are freed when memory is needed.
    stats = dict(line.split(maxsplit=1) for line in text_of(CGROUP / "memory.stat").splitlines())
    return max(0, min(machine, int(limit) - int(used) + int(stats.get("inactive_file", 0))))


def text_of(path: Path) -> str:
    """The text of a file of the operating system; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
