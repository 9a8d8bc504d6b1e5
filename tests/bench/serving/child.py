"""A part of a bench in a process of its own, which prints what it found as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from ..errors import ServerError

_RESULT: Final = "RESULT "


def result_of(module: str, *words: str, **variables: str) -> Any:
    """Run a module of ours with these words, and no variables of ours but these."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AITHER_")}
    inherited["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return _run([sys.executable, "-P", "-m", module, *words], {**inherited, **variables})


def tell(result: Any) -> None:
    sys.stdout.write(f"\n{_RESULT}{json.dumps(result)}\n")


def _run(command: list[str], environment: Mapping[str, str]) -> Any:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", timeout=3600, check=False,
    )  # fmt: skip
    lines = [each for each in done.stdout.splitlines() if each.startswith(_RESULT)]
    if done.returncode or not lines:
        raise ServerError(f"{command[3]} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return json.loads(lines[-1].removeprefix(_RESULT))
