"""The faults of ``kvgraph bench faults``, in short: each runs, and finds what it looks for."""

from __future__ import annotations

import importlib
import json
import os
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from budgets import small_or_large
from kvgraph_bench.errors import BenchError
from kvgraph_bench.faults import faults_graph, faults_machine, mends
from kvgraph_bench.faults.faults import FAULTS, Fault, Say, Size, run
from kvgraph_bench.faults.faults_chaos import Chaos
from kvgraph_bench.faults.faults_engines import kill_engines, kill_publishers
from kvgraph_bench.faults.faults_graph import (
    apply_mutants,
    bad_loads_of_damage,
    bad_loads_of_kills,
    churn,
)
from kvgraph_bench.faults.faults_http import Crowd, ages_beside_a_stopped_engine, crowded
from kvgraph_bench.faults.faults_load import SHARES, burst, lose
from kvgraph_bench.faults.faults_replays import (
    WAYS,
    absent_after_a_late_replay,
    is_the_same_when_repeated,
    replay,
)
from kvgraph_bench.faults.faults_sidecar import (
    KILLS,
    REQUESTS,
    STOPPED_S,
    kill_over_and_over,
    stop_for,
)
from kvgraph_bench.figures import Figures
from kvgraph_bench.serving.engine_child import Moment, StepWatch

FULL = os.environ.get("KVGRAPH_TEST_FULL_FAULTS") == "1"
"""Whether faults are played at their full size, which takes minutes each."""
pytestmark = [pytest.mark.timeout(7200)] if FULL else []
SLACK = 1 if FULL else 5
"""A machine that is shared is late by so much; a time that is missed by more is no accident."""


@pytest.mark.parametrize("count", small_or_large(20_000, 1_000_000 if FULL else 100_000))
def test_typed_mutants_harm_no_graph(count: int) -> None:
    seed = random.randrange(1 << 30)
    done = apply_mutants(seed, count)
    assert done["crashes"] == 0, f"seed {seed}"
    assert done["applied"] > count // 6, "a quarter still decodes: what it means is checked, too"
    assert done["unknown"] > 0


@pytest.mark.timing
@pytest.mark.parametrize("share", SHARES)
def test_every_lost_batch_is_noticed_and_made_good(socket_directory: Path, share: float) -> None:
    seed = random.randrange(1 << 30)
    loss = lose(socket_directory, share, 4.0, seed)
    assert loss.noticed >= loss.holes, f"seed {seed}"
    assert loss.noticed == loss.holes or loss.forgotten, f"seed {seed}"
    assert loss.in_step, f"seed {seed}"
    assert loss.holes > 0 or share < 0.01


@pytest.mark.timing
def test_a_large_engines_events_are_taken_in_as_they_come(socket_directory: Path) -> None:
    loss = lose(socket_directory, 0.0, 600.0 if FULL else 8.0, 1)
    assert (loss.noticed, loss.forgotten, loss.in_step) == (0, 0, True)
    assert float(np.percentile(loss.observed.lags, 99)) < SLACK
    at, sizes = np.array(loss.observed.rss, dtype=np.float64).T
    if FULL:
        assert loss.observed.slope * 60 < 1e6, "bytes a minute"
    half = sizes[at >= at[-1] / 2]
    assert half[-1] - half[0] < 32e6, "it turned over a hundred thousand blocks meanwhile"


@pytest.mark.timing
def test_a_burst_costs_an_engine_nothing_and_is_caught_up_with(socket_directory: Path) -> None:
    waits, took, _ = burst(socket_directory, 30.0 if FULL else 2.0)
    assert took is not None
    assert took < 60
    assert float(np.median(waits)) < 1e-3
    assert float(np.percentile(waits, 99)) < 1e-3 * SLACK


@pytest.mark.timing
def test_clients_that_say_nothing_or_do_not_read_cost_the_others_little(
    socket_directory: Path,
) -> None:
    seen = crowded(socket_directory, 120.0 if FULL else 5.0, 1)
    assert len(seen.waits) > 10 * seen.failed, "who comes while all lines are taken is cut off"
    assert float(np.percentile(seen.waits + seen.refused, 99)) < SLACK
    assert max(seen.ages) < 2 * SLACK
    assert seen.rss_growth < 50e6


class Doors(BaseHTTPRequestHandler):
    """Answers 503 to one path, 404 to another, 200 to all others."""

    def do_GET(self) -> None:
        status = {"/busy": 503, "/gone": 404}.get(self.path, 200)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_waits_for_a_503_are_kept_apart_from_those_for_answers() -> None:
    with HTTPServer(("127.0.0.1", 0), Doors) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        crowd = Crowd(f"http://127.0.0.1:{server.server_port}", "", [1])
        try:
            for path in ("/status", "/busy", "/gone", "/busy", "/busy"):
                crowd.ask_once(path)
        finally:
            server.shutdown()
            thread.join()
    crowd.ask_once("/status")
    assert (len(crowd.waits), len(crowd.refused), crowd.failed) == (2, 3, 1)


@pytest.mark.engine
def test_a_real_engine_serves_on_while_its_sidecar_is_killed(socket_directory: Path) -> None:
    kills, requests = (KILLS, REQUESTS) if FULL else (1, 20)
    killed = kill_over_and_over(socket_directory, kills, requests, quiet)
    assert killed.served.failed == 0
    assert killed.served.answered >= requests
    took = [each for each in killed.took if each is not None]
    assert len(took) == kills, "its ranking is of its pool again, block for block"
    assert float(np.percentile(took, 99)) < 5 * SLACK


@pytest.mark.engine
def test_a_real_engine_serves_on_while_its_sidecar_is_stopped(socket_directory: Path) -> None:
    told = stop_for(socket_directory, STOPPED_S if FULL else 5.0, quiet)
    assert told.served.failed == 0
    assert told.served.answered >= 20
    assert told.back_s is not None
    assert told.back_s < 5 * SLACK
    if FULL:
        stock = [float(np.median(each)) for each in told.stock]
        assert float(np.median(np.concatenate(told.ours))) <= max(stock), "within its spread"


@pytest.mark.timing
def test_a_killed_engine_is_forgotten_and_nobody_gets_its_advice(socket_directory: Path) -> None:
    kills = 20 if FULL else 2
    gone = kill_engines(socket_directory, kills, quiet)
    kill_publishers(socket_directory, kills, gone, quiet)
    assert gone.foreign == gone.strange == 0
    late = 2 if FULL else 20
    assert max(gone.hooked + gone.observed) < late, "forgotten, not waited for"


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_replay_leaves_a_true_picture_or_one_that_says_so(
    socket_directory: Path, way: str
) -> None:
    seed = random.randrange(1 << 30)
    right, visible, attempts = replay(socket_directory, way, random.Random(seed))
    assert right, f"seed {seed}"
    assert visible or way != "never", f"seed {seed}"
    assert attempts <= 5 or visible is False, f"seed {seed}"


def test_what_was_removed_while_its_storing_was_lost_is_absent(socket_directory: Path) -> None:
    assert absent_after_a_late_replay(socket_directory)


def test_batches_repeated_in_any_order_leave_the_same_bytes(socket_directory: Path) -> None:
    seed = random.randrange(1 << 30)
    assert is_the_same_when_repeated(socket_directory, random.Random(seed)), f"seed {seed}"


@pytest.mark.timing
def test_an_engine_beside_one_that_is_stopped_keeps_its_advice(socket_directory: Path) -> None:
    ages = ages_beside_a_stopped_engine(socket_directory, 3.0, 1)
    assert float(np.median(ages)) < 2.0


@pytest.mark.timing
@pytest.mark.parametrize("name", ["disk", "clock"])
def test_a_fault_of_a_few_seconds_runs_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults_machine, "_A_JUMP_S", 0.5)
    figures = run([name], False, 1, tmp_path, progress=False).figures
    bad = [each for each in figures if figures[each].target == "0" and figures[each].value]
    assert bad == []


@pytest.mark.timing
def test_after_faults_on_top_of_each_other_all_is_well_again(socket_directory: Path) -> None:
    seed = random.randrange(1 << 30)
    chaos = Chaos(socket_directory, seed)
    chaos.play(15 if FULL else 1, quiet)
    assert chaos.happened
    back = [each for each in chaos.back if each is not None]
    assert len(back) == len(chaos.back), f"seed {seed}: {chaos.happened}"
    assert max(back) < 5 * SLACK, f"seed {seed}: {chaos.happened}"


@pytest.mark.timing
def test_waiting_counts_and_losing_a_core_does_not() -> None:
    class Connector:
        def build_connector_meta(self) -> None:
            time.sleep(0.02)  # blocked

        def on_new_request(self) -> None:
            self.build_connector_meta()  # counted once

    connector, watch = Connector(), StepWatch()
    watch.over(connector, ("build_connector_meta", "on_new_request"))
    connector.on_new_request()
    assert 0.02 <= watch.take() < 0.04
    assert watch.take() == 0.0
    early = Moment(1.0, 0.1, waited=5)
    assert early.until(Moment(2.0, 0.2, waited=5)) == pytest.approx(0.1), "it waited for nothing"
    assert early.until(Moment(2.0, 0.2, waited=6)) == 1.0, "perhaps for Python's lock"
    assert early.until(Moment(1.1, 0.9, waited=5)) == pytest.approx(0.1), "the rest is watching"


def quiet(_: str) -> None:
    """What a bench says while it goes on."""


def test_a_writer_that_is_killed_leaves_a_whole_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 30)
    if not FULL:
        monkeypatch.setattr(faults_graph, "_CUT_EVERY", 1 << 14)
    bad, longest = bad_loads_of_kills(tmp_path, 200 if FULL else 8, seed, quiet)
    assert bad == 0, f"seed {seed}"
    assert longest < 5
    assert bad_loads_of_damage(tmp_path, 1000 if FULL else 150, seed) == 0, f"seed {seed}"


def test_churn_goes_through_a_graph_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_graph, "RESIDENT", 2000)
    monkeypatch.setattr(faults_graph, "GHOSTS", 2000)
    monkeypatch.setattr(faults_graph, "SESSIONS", 300)
    monkeypatch.setattr(faults_graph, "AT_ONCE", 10)
    peak, *_ = churn(2000)
    later, series, blocks, sessions = churn(10_000)
    assert later - peak < 64e6, "five times as many came, and as many are known"
    assert blocks <= 4500
    assert sessions <= 300
    assert series <= 2000


def test_faults_run_by_name_and_are_kept_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def fault(name: str) -> Fault:
        def run(figures: Figures, size: Size, say: Say) -> None:
            runs.append(f"{name} {size.of(1, 2)} {size.seed}")
            figures.add(f"{name}_figure", 7, "")

        return run

    for name, place in FAULTS.items():
        module, _, function = place.partition(":")
        imported = importlib.import_module(module, "kvgraph_bench.faults")
        monkeypatch.setattr(imported, function, fault(name))
    figures = run(["burst"], False, 5, tmp_path, progress=False)
    assert runs == ["burst 1 5"]
    assert list(figures.figures) == ["burst_figure"]
    assert json.loads((tmp_path / "burst.json").read_text())["figures"]["burst_figure"]["n"] == 1
    run(["http"], True, 5, tmp_path, progress=False)
    everything = run([], True, 5, tmp_path, progress=False)
    assert set(everything.figures) == {f"{name}_figure" for name in FAULTS}, "kept ones too"
    full = [each.split()[0] for each in runs[2:]]
    assert full == [name for name in FAULTS if name != "http"], "a short result is no full one"
    with pytest.raises(BenchError, match=r"no fault is called gremlins; there are load, losses"):
        run(["gremlins"], False, 5, tmp_path, progress=False)


@pytest.mark.parametrize("mend", mends.MENDS, ids=lambda mend: mend.name)
def test_a_mend_that_can_be_taken_out_stands_in_the_tree_once(mend: mends.Mend) -> None:
    assert (mends.ROOT / mend.file).read_text().count(mend.old) == 1
    assert mend.new != mend.old
    places = [word for word in mend.tests.split() if word.startswith("tests/")]
    assert places
    assert all((mends.ROOT / place).exists() for place in places)


def test_a_mend_is_taken_out_of_a_copy_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take seconds to import
    mend = mends.Mend("a sum", "sums.py", "a + b", "a - b", "test_sums.py")
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    (tmp_path / "conftest.py").write_text("import sys\n\nsys.path.insert(0, '.')\n")
    assert mends.tested(tmp_path, mend.tests) == 0
    with mends.taken_out(tmp_path, mend):
        assert mends.tested(tmp_path, mend.tests) == 1
    assert "a + b" in (tmp_path / mend.file).read_text()
    assert mends.tested(tmp_path, "none.py") == 2
    with mends.taken_out(tmp_path, mend._replace(new="__import__('os').abort()")):
        assert mends.tested(tmp_path, mend.tests) == 1  # no test passes that ends the process
    with (
        pytest.raises(BenchError, match="0 times"),
        mends.taken_out(tmp_path, mend._replace(old="a * b")),
    ):
        pass


def test_mends_run_by_their_name_alone_and_say_which_there_are(tmp_path: Path) -> None:
    assert "mends" not in FAULTS
    with pytest.raises(BenchError, match="no mend has it"):
        run(["mends"], False, 1, tmp_path, False, only="nothing of the kind")
