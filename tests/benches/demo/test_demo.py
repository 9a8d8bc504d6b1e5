"""The demo: its server, its ledger, and what table and file say of its passes."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from kvgraph.graph.types import SourceLayer
from kvgraph_bench.closed.closed_pass import Clock, ClosedAnswer, ClosedPass, ClosedRun
from kvgraph_bench.closed.open_paper import OpenRun
from kvgraph_bench.demo.demo import (
    HAD,
    ArmResult,
    DemoResult,
    DemoRun,
    print_last_words,
    print_report,
    run_found,
)
from kvgraph_bench.demo.engine_cliff import EngineCliff
from kvgraph_bench.errors import ServerError
from kvgraph_bench.serving import vllm_server
from kvgraph_bench.serving.cache_ledger import Books, Tally, layers_of
from kvgraph_bench.serving.completions import Answer
from kvgraph_bench.serving.progress import DemoProgress
from kvgraph_bench.serving.vllm_server import ADVISED, HINTS, SWITCH, Server, ServerPlan
from kvgraph_bench.serving.workload import BLOCK
from rich.console import Console


def answered(name: str, cached: int, ttft_s: float) -> OpenRun:
    answers = [
        ClosedAnswer(0.0, True, Answer("a/0", "w5 w6", ttft_s, 1.0, 1000, cached, 10)),
        ClosedAnswer(1.0, False, Answer("a/1", "w7", ttft_s, 1.0, 1000, cached, 10)),
    ]
    return OpenRun(name, answers, 2.0, None)


def arm(name: str, cached: int, ttft_s: float, rules_lost: int) -> ArmResult:
    evicted = Counter({SourceLayer.RULES: rules_lost, SourceLayer.TOOL_RESULT: 40})
    again = Counter({SourceLayer.RULES: rules_lost // 2})
    price = 0.25 if name.startswith("told") else None
    return ArmResult(answered(name, cached, ttft_s), Tally(evicted=evicted, again=again), price)


def demo_of(tmp_path: Path, told_lost: int) -> DemoResult:
    arms = (
        arm("stock", 400, 0.4, rules_lost=3),
        arm("nothing said", 450, 0.4, rules_lost=2),
        arm("told everything", 550, 0.3, rules_lost=told_lost),
    )
    return DemoResult(tmp_path, 2, 180, 0.1, arms)


@pytest.fixture
def result(tmp_path: Path) -> DemoResult:
    return demo_of(tmp_path, 0)


def cliff_run(name: str, turns: int, ttft_s: float) -> ClosedRun:
    clock = Clock(1 / 60, 10.0, 60.0)
    answers = tuple(
        ClosedAnswer(10.0 + 59.0 * at / turns, at < 2, Answer("a", "", ttft_s, ttft_s, 100, 60, 4))
        for at in range(turns)
    )
    return ClosedRun(name, 32, ClosedPass(clock, answers, (), 0), None)


@pytest.fixture
def cliff() -> EngineCliff:
    return EngineCliff(cliff_run("stock", 80, 0.9), cliff_run("kvgraph", 240, 0.03))


def text_of(printing: Callable[[Console], None], width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    printing(console)
    return console.export_text()


def test_figures_compare_the_arms(result: DemoResult) -> None:
    figures = DemoRun(result.out, found=result).figures().as_dict()["figures"]
    assert figures["hit_gain_points"]["value"] == pytest.approx(15)
    assert figures["hit_gain_points_no_hints"]["value"] == pytest.approx(5)
    assert figures["told_over_nothing_said"]["value"] == pytest.approx(10)
    assert figures["protected_lost"]["value"] == 0
    assert figures["stock_protected_lost"]["value"] == 3
    assert figures["protection_price_points"]["value"] == 0.25
    assert figures["ttft_p50_ratio"]["value"] == pytest.approx(0.75)


def test_the_end_says_what_was_seen_what_to_do_and_where_the_page_is(
    result: DemoResult, cliff: EngineCliff
) -> None:
    run = DemoRun(result.out, engine=cliff, found=result)
    address = "http://127.0.0.1:1/open?token=secret#edit=secret"
    text = text_of(lambda console: print_last_words(run, address, console), width=1000)
    seen, next_step, page = text.strip().splitlines()
    assert "80 turns a minute" in seen
    assert "55.0% (told everything)" in seen
    assert "AITHER_KVCACHE_GRAPH=1" in next_step
    assert "http://127.0.0.1:1 " in page
    assert "secret" not in page


def test_the_report_says_what_every_arm_had_and_no_text(result: DemoResult) -> None:
    shown = text_of(partial(print_report, result), width=120)
    for expected in ("55.0%", "the switch, signals, layers", " 0.2 ", "400 / 400 ms", "again"):
        assert expected in shown
    saved = DemoRun(result.out, found=result).save().read_text()
    assert "w5" not in shown + saved
    arms = json.loads(saved)["found"]["arms"]
    assert arms["stock"]["evicted"]["rules"] == 3
    assert arms["stock"]["computed_again"]["rules"] == 1


def test_arms_on_paper_are_told_what_they_say_they_are(
    paper_config: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("kvgraph_bench.demo.demo.base_config", lambda model: paper_config)
    monkeypatch.delenv(HINTS, raising=False)
    result = run_found(tmp_path, DemoProgress(0, shown=False), requests=50)
    assert [arm.run.arm for arm in result.arms] == list(HAD)
    stock, silent, told = result.arms
    assert stock.price_points is silent.price_points is None
    assert told.price_points is not None
    assert {len(arm.run.answers) for arm in result.arms} == {50}
    assert stock.tally.protected_lost > 0
    assert told.tally.protected_again <= told.tally.protected_lost
    assert HINTS not in os.environ


RULES = tuple(range(100, 100 + BLOCK))
MIXED = tuple(range(200, 200 + BLOCK))
PROMPT = (*RULES, *MIXED, 7, 8, 9)
LAYERS = [
    *[SourceLayer.RULES] * BLOCK,
    *[SourceLayer.USER_TURN] * 20,
    *[SourceLayer.CONTEXT] * (BLOCK - 20 + 3),
]
KNOWN = dict(layers_of(PROMPT, LAYERS))


def payload(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 0])


def stored(
    hashes: list[int], tokens: Iterable[int], parent: int | None = None
) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "CPU",
    }


@pytest.fixture
def books() -> Books:
    return Books(KNOWN)


def test_blocks_are_booked_under_their_most_precious_layer(books: Books) -> None:
    books.apply(payload(stored([1, 2], RULES + MIXED)))
    assert books.tally.stored == {SourceLayer.RULES: 1, SourceLayer.CONTEXT: 1}


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


def test_a_server_with_the_graph_is_up_only_once_it_is_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "LINK_TIMEOUT_S", 0.3)
    obedient = HEALTHY.replace("signal.SIG_IGN", "signal.SIG_DFL")
    plan = FakePlan("m", True, tmp_path, script=obedient)
    with pytest.raises(ServerError, match="no kvgraph sidecar advises"), Server(plan):
        pass
    with Server(replace(plan, script=f"print({ADVISED!r}, flush=True)\n{obedient}")) as server:
        assert server.runs
    with Server(replace(plan, linked=False)) as server:
        assert server.runs
