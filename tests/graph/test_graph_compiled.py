"""What is said where the compiled part is missing, and what goes on without it."""

from __future__ import annotations

import subprocess
import sys

_WITHOUT = "import sys; sys.modules['kvgraph._graph'] = None\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT + program], capture_output=True, text=True, timeout=120
    )


def test_a_sidecar_says_in_a_line_what_it_lacks() -> None:
    done = run("from kvgraph.advisor.cli import main; main(['serve', '--http-port', '0'])")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("kvgraph: a sidecar")
    assert "kvgraph._graph" in line
    assert "C++ compiler" in line


def test_an_engine_needs_none_of_it() -> None:
    done = run(
        "import kvgraph.hooks.fake, kvgraph.hooks.link.client, kvgraph.graph.admission\n"
        "engine = kvgraph.hooks.fake.FakeEngine('ipc:///tmp/kvgraph-nobody')\n"
        "print(engine.client.dropped)"
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
