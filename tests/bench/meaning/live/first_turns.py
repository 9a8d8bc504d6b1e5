"""``precache_ttft_ratio``: how soon a first turn is answered whose prefix was computed before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import BenchError
from ...serving.vllm_server import Server
from ...serving.workload import BLOCK
from .chat_model import Words
from .chat_server import ask, runtime_of, said
from .survival import burst

if TYPE_CHECKING:
    from openai import OpenAI

_PREFIX: Final = 48  # blocks: a fifth of the pool
_COMMAND: Final = "from kvgraph.advisor.cli import main; main()"


def first_turns(
    server: Server, client: OpenAI, words: Words, directory: Path, count: int
) -> list[float]:
    """Seconds until the first token of first turns, each behind ``kvgraph precache`` and then
    others' prompts that fill the pool.

    Raises:
        BenchError: ``kvgraph precache`` failed.
    """
    system = words.text(_PREFIX * BLOCK)
    file = directory / "precache.toml"
    file.write_text(f'[server]\nurl = "{server.url}/v1"\n[[prefix]]\nsystem = "file:system.md"\n')
    (directory / "system.md").write_text(system)
    found = []
    for _ in range(count):
        _precache(file, directory)
        burst(client, words)
        turn = [said("system", system), said("user", words.text(8))]
        found.append(ask(client, turn, 2).first_s)
    return found


def _precache(file: Path, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "precache", str(file)], text=True, capture_output=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_of(directory))}, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchError(f"kvgraph precache ended with {done.returncode}: {done.stdout[-500:]}")
