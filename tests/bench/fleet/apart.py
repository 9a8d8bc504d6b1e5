"""Runs a stage in a network of its own, where nobody else reaches what listens on all interfaces.

A stage is a module with a function ``play(what: str)``, whose result is JSON. This module is the
program that calls it there: its last line on stdout is ``RESULT {json}``, and each line on stderr
that begins with ``SAY`` is for people.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ..errors import BenchError

APART: Final = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Before a command: it gets a network of its own, and what it started ends with it."""

_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
"""Without these, vLLM looks for a minute for an address that is not loopback's."""

_RESULT: Final = "RESULT "
_SAY: Final = "SAY "
_TAIL: Final = 12  # lines of what a stage said, where it failed; chosen


def has_networks() -> bool:
    found = shutil.which("unshare") is not None
    return found and not subprocess.run([*APART, "true"], stderr=subprocess.DEVNULL).returncode


def run_apart(
    module: str, what: str, say: Callable[[str], None], longest_s: float
) -> dict[str, Any]:
    """Play ``what`` on the stage ``module``; ``say`` gets its lines. BenchError: it broke."""
    command = [*APART, sys.executable, "-P", "-m", __name__, module, what]
    tail: deque[str] = deque(maxlen=_TAIL)
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stage:
        assert stage.stdout is not None
        hearing = threading.Thread(target=_hear, args=(stage.stderr, say, tail))
        killing = threading.Timer(longest_s, stage.kill)
        killing.daemon = True
        try:
            killing.start()
            hearing.start()
            results = [each for each in stage.stdout if each.startswith(_RESULT)]
            hearing.join()
        finally:
            killing.cancel()
            stage.kill()
    if not results:
        ended = time.monotonic() - began >= longest_s
        how = f"was ended after {longest_s:.0f} s" if ended else "broke"
        raise BenchError(f"{module} {how}:\n" + "".join(tail))
    found: dict[str, Any] = json.loads(results[-1].removeprefix(_RESULT))
    return found


def _hear(lines: Any, say: Callable[[str], None], tail: deque[str]) -> None:
    for line in lines:
        tail.append(line)
        if line.startswith(_SAY):
            say(line.removeprefix(_SAY).rstrip())


def tell(line: str) -> None:
    sys.stderr.write(f"{_SAY}{line}\n")
    sys.stderr.flush()


def _on_stage(module: str, what: str) -> NoReturn:
    """Play in this new network, whose loopback is down; say what came of it, and end."""
    code = 1
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        os.environ.update(_LOOPBACK)
        found = importlib.import_module(module).play(what)
        sys.stdout.write(f"\n{_RESULT}{json.dumps(found)}\n")
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        end(code)


def end(code: int = 0) -> NoReturn:
    """End this process, whatever its threads wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _on_stage(*sys.argv[1:])
