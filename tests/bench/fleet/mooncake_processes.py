"""Mooncake's processes: its master, and a client that only owns memory for values."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvgraph.hooks.store.stores import MooncakeStore
from kvgraph.kernels.errors import StorageError

from ..errors import ServerError
from .apart import has_networks

PORT: Final = 50951
PLACE: Final = f"mooncake://127.0.0.1:{PORT}"

_START_S: Final = 30.0


def why_not() -> str:
    """What Mooncake lacks here; empty if nothing."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'kvgraph[mooncake]'"
    asked = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True
    )
    if asked.returncode:
        return f"Mooncake cannot be loaded: {asked.stderr.strip().splitlines()[-1]}"
    if not has_networks():
        return "no network namespace can be made here, and its clients listen on all interfaces"
    return ""


def start_master() -> subprocess.Popen[bytes]:
    """Start a master on loopback; it may take a moment until it listens."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).parent / "mooncake_master"
    return subprocess.Popen(
        [
            str(program), "--rpc_address=127.0.0.1", f"--rpc_port={PORT}",
            "--metrics_host=127.0.0.1", "--enable_metric_reporting=false",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def connected(adds: int = 0) -> MooncakeStore:
    """A client with ``adds`` bytes for values, once the master takes it; else StorageError."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return MooncakeStore(PLACE, adds)
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def owner(adds: int) -> Iterator[subprocess.Popen[str]]:
    """A process that owns ``adds`` bytes of the store; raises ServerError if it did not start."""
    command = [sys.executable, "-P", "-m", __name__, str(adds)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "owns":
            raise ServerError("the owner of the store's memory did not start")
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    store = connected(int(sys.argv[1]))
    sys.stdout.write("owns\n")
    sys.stdout.flush()
    threading.Event().wait()
