"""The servers under test differ by the switch alone, and none is left behind."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kvgraph_bench.serving.vllm_server import HINTS, SWITCH, Server, ServerPlan


@pytest.fixture
def plan(tmp_path: Path) -> ServerPlan:
    return ServerPlan("some/model", graph=False, directory=tmp_path, blocks=100)


def test_arms_differ_by_the_switch_and_what_callers_may_say(plan: ServerPlan) -> None:
    inherited = {"PATH": "/bin", SWITCH: "1", "KVGRAPH_SCORE__AGE": "3"}
    stock, graph = (replace(plan, graph=on).environment(inherited) for on in (False, True))
    assert graph.items() - stock.items() == {(SWITCH, "1"), (HINTS, "all")}
    assert not any(name.startswith(("AITHER_", "KVGRAPH_")) for name in stock)


@dataclass(frozen=True, slots=True)
class FakePlan(ServerPlan):
    script: str = ""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, str(port)]


def fake(tmp_path: Path, script: str) -> Server:
    return Server(FakePlan("m", False, tmp_path, script=script))


HEALTHY = """
import http.server, os, subprocess, sys, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("child", "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_stop_ends_the_whole_process_group(tmp_path: Path) -> None:
    server = fake(tmp_path, HEALTHY)
    with server:
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)
        server.stop(grace_s=0.2)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        if ") Z" in Path(f"/proc/{child}/stat").read_text():
            break  # dead; whoever inherited it has not read its status yet
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}/stat").exists()
