"""On what machine, when and by which command something was measured: the head of a raw file."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path


def measured_now() -> dict[str, str]:
    """Date, machine, Python's version, and the command line."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "python": platform.python_version(),
        "command": " ".join(["kvgraph", *sys.argv[1:]]),
    }


def machine() -> str:
    """The machine, in words: its processor, cores and system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{os.cpu_count()} × {model}, {platform.system()} {platform.machine()}, no GPU used"
