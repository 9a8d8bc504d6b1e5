"""A raw file: what was measured, and on what machine, when and by which command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console


def keep_raw(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a raw file. Where that fails, say so and go on: what was measured is printed still."""
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        problem = f"not kept: {path} cannot be written: {error.strerror}"
        Console(stderr=True).print(problem, style="red", markup=False, soft_wrap=True)


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
