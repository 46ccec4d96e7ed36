# SPDX-License-Identifier: Apache-2.0
"""What this process may use of the machine, containers' limits included."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def cores() -> int:
    """Cores that this process may use at once: those that it may run on, and no more than its container's share."""
    count = len(os.sched_getaffinity(0))
    words = text_of(CGROUP / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        count = min(count, max(1, int(words[0]) // int(words[1])))
    return count


def available_bytes() -> int:
    """Memory that can be had without swapping: the machine's, and no more than its container's limit leaves."""
    lines = (line.split() for line in text_of(MEMINFO).splitlines())
    machine = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), 1 << 62)
    limit, used = (text_of(CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return machine
    # Files that were read, such as weights, count as used and make room when it is needed.
    stats = dict(line.split(maxsplit=1) for line in text_of(CGROUP / "memory.stat").splitlines())
    return max(0, min(machine, int(limit) - int(used) + int(stats.get("inactive_file", 0))))


def text_of(path: Path) -> str:
    """A file of the kernel's; empty where it has none."""
    try:
        return path.read_text()
    except OSError:
        return ""
