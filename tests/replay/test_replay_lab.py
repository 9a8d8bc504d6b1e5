"""The lab's commands, recordings, arrivals and priors; a hit rate by a call from Python."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from command_line import kvgraph
from hand_clock import Clock
from kvgraph import ClassicPolicy, KvGraphError, Trace, hit_rate
from kvgraph.advisor.policies.hazard import AGES
from kvgraph.advisor.policies.lifecycle import Returns, load_prior
from kvgraph.advisor.policies.registry import new_policy
from kvgraph.advisor.policies.waits import FEATURES, STATED_FEATURE
from kvgraph.advisor.replay.analysis import analyze
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings, new_orders, run_arm, run_cells
from kvgraph.advisor.replay.graph_order import EngineUpdate, SimulatedSidecar
from kvgraph.advisor.replay.prior import learn_prior, recorded_waits
from kvgraph.advisor.replay.reader import infer_sessions, load_trace, spread_over_ticks
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.tables import HitTable, _equal_columns, draw, hit_table
from kvgraph.advisor.replay.trace import ReplayError, TraceError
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.events import MAX_SEGMENTS, RequestFinished, RequestStarted, Segment
from kvgraph.hooks.link.outbox import as_tip
from made_trace import chat_trace
from made_traffic import agents, made
from msgspec.structs import replace
from threadpoolctl import threadpool_info

SHARED = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
# As measured by others on this trace: capacity → hit rate.
LRU = {1000: 0.0445, 2000: 0.054, 5000: 0.112, 10_000: 0.212, 20_000: 0.288}
BELADY = {1000: 0.191, 2000: 0.255, 5000: 0.341, 10_000: 0.366, 20_000: 0.366}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A small trace: half of the sessions come back, some of them after a while."""
    rng = random.Random(7)
    rows, live, fresh = [], [], 1
    for i in range(240):
        chain = live.pop(rng.randrange(len(live))) if live and rng.random() < 0.5 else [0]
        grown = rng.randrange(1, 5)
        chain = chain + list(range(fresh, fresh + grown))
        fresh += grown
        if rng.random() < 0.7:
            live.append(chain)
        row = {"timestamp": 400 * i, "input_length": 512 * len(chain), "output_length": 20}
        rows.append(row | {"hash_ids": chain})
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Reports = Callable[..., Any]


@pytest.fixture
def reported(trace_file: Path) -> Reports:
    """What ``kvgraph replay --json`` says of the small trace."""

    def report(*words: object) -> Any:
        done = kvgraph("replay", str(trace_file), *map(str, words), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return report


def test_json_names_every_policy_and_capacity_and_a_picture_is_written(
    reported: Reports, tmp_path: Path
) -> None:
    policies, picture = ["lru", "classic", "classic+hints", "belady"], tmp_path / "band.png"
    words = ["--policy", ",".join(policies), "--processes", 1, "--picture", picture]
    found = reported("--capacity", "40,100", *words)
    assert found["trace"] == "small.jsonl"
    assert list(found["policies"]) == policies
    for each in found["policies"].values():
        assert list(each) == ["40", "100"]
        assert 0 <= each["40"] <= each["100"] <= 1
    assert found["policies"]["belady"]["40"] >= found["policies"]["lru"]["40"]
    assert found["seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_two_processes_find_what_one_finds(reported: Reports) -> None:
    words = ["--capacity", "50", "--policy", "lru,classic,arc"]
    one, two = (reported(*words, "--processes", number)["policies"] for number in (1, 2))
    assert one == two


def test_a_table_is_shown_to_people(trace_file: Path) -> None:
    words = ["--capacity", "40", "--policy", "lru", "--processes", "1"]
    done = kvgraph("replay", str(trace_file), *words)
    assert done.returncode == 0
    assert "lru" in done.stdout


@pytest.mark.parametrize(
    "words",
    [["replay", "--capacity", "40", "--policy", "lru"],
     ["plan", "--blocks", "40", "--engines", "1", "--host", "0"]],
    ids=["replay", "plan"],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["table", "json"])
def test_a_full_disk_costs_the_picture_alone(
    trace_file: Path, tmp_path: Path, words: list[str], as_json: list[str]
) -> None:
    (command, *more), picture = words, tmp_path / "full.png"
    picture.symlink_to("/dev/full")
    done = kvgraph(command, str(trace_file), *more, "--picture", str(picture), *as_json)
    assert done.returncode != 0
    assert f"picture '{picture}': No space left on device" in done.stderr
    assert done.stdout, "what took hours to compute"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--capacity", "0"], "--capacity '0'"),
        (["--capacity", "many"], "--capacity 'many'"),
        (["--policy", "wishful"], "policy 'wishful'"),
        (["--picture", "/nowhere/a.png"], "--picture '/nowhere/a.png': there is no directory"),
        (["--picture", "/tmp"], "--picture '/tmp': is a directory; allowed: a file"),
        (["--analyze", "--policy", "all"], "--analyze goes without --policy"),
        (["--block-size", "0"], "--block-size"),
        (["/nowhere/second.jsonl", "--policy", "lru"], "second.jsonl: there is no such file"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    trace_file: Path, words: list[str], problem: str
) -> None:
    done = kvgraph("replay", str(trace_file), *words)
    assert done.returncode == 2
    assert problem in done.stderr


def test_equal_columns_are_pointed_out_once() -> None:
    row = {1: 0.1, 2: 0.2, 3: 0.3}
    rates = {"lru": row, "lifecycle": row, "arc": row, "lfu": {**row, 3: 0.4}}
    assert list(_equal_columns(rates, guard=False)) == [
        "lru, lifecycle and arc are equal at every capacity"
    ]
    (note,) = _equal_columns(rates, guard=True)
    assert note.endswith(
        "are equal at every capacity: the guard let lifecycle rank never, or in vain"
    )


def test_pools_that_are_never_full_are_one_note(trace_file: Path) -> None:
    trace = load_trace(trace_file)
    ample = [trace.num_blocks + more for more in (0, 1, 2)]
    table = hit_table(trace, ["lru", "sieve", "infinite"], ample, Settings(), processes=1)
    (note,) = table.notes
    assert note.startswith(f"no pool is ever full: small.jsonl has {trace.num_blocks:,} blocks")


def test_the_way_from_lru_to_belady(trace_file: Path) -> None:
    trace = load_trace(trace_file)
    rates = {"lru": {10: 0.2}, "x": {10: 0.3}, "belady": {10: 0.4}}
    assert HitTable(trace, (10,), rates, 0.0).way("x", 10) == pytest.approx(0.5)
    assert HitTable(trace, (10,), {"x": {10: 0.3}}, 0.0).way("x", 10) is None


def test_analysis_splits_the_loss(trace_file: Path) -> None:
    trace = load_trace(trace_file)
    small, large = analyze(trace, 40), analyze(trace, trace.num_blocks)
    assert small.multi_turn_share + small.cross_session_share == pytest.approx(1.0)
    assert small.gap_points > 0
    assert large.gap_points == 0
    assert small.gap_tokens == pytest.approx(small.gap_points / 100 * trace.prompt_blocks * 512)
    assert 0 < small.budget_blocks <= trace.num_blocks
    assert 0 < small.multi_turn_sessions < 1


def test_analysis_command(reported: Reports) -> None:
    losses = reported("--analyze", "--capacity", "40")["losses"]["40"]
    assert losses["infinite_hit_rate"] > losses["lru_hit_rate"]


def test_a_sidecars_configuration_ranks_in_the_lab_too(
    reported: Reports, trace_file: Path, tmp_path: Path
) -> None:
    path, rates = tmp_path / "config.toml", []
    for score in ("", "[score]\nage = -1.0\nhit_count = 40.0\n"):
        path.write_text(f"[policy]\nguard = false\n{score}")
        found = reported("--policy", "classic", "--capacity", 60, "--config", path)
        rates.append(found["policies"]["classic"]["60"])
    assert rates[0] > rates[1], "what was used last goes first"
    path.write_text("[score]\nages = 1\n")
    assert kvgraph("replay", str(trace_file), "--config", str(path)).returncode == 2


def test_a_table_says_what_its_reader_would_not_guess(trace_file: Path) -> None:
    trace = load_trace(trace_file)
    arms = ["lru", "classic", "default+hints", "default+stops"]
    notes = " ".join(hit_table(trace, arms, [5], Settings(), processes=1).notes)
    assert "takes from the future which request is its session's last" in notes
    assert "does not say why answers ended" in notes
    assert "prompts have more than 5 blocks" in notes


# Recording --------------------------------------------------------------------------------------


def request(name: str, keys: list[int], outputs: list[int], session: str | None) -> list[Any]:
    hashes, written = as_keys(keys).tobytes(), as_keys(outputs).tobytes()
    tokens = 16 * len(keys) + 3
    start = RequestStarted(name, hashes, tokens, 0, 16, session)
    done = RequestFinished(name, hashes + written, tokens, tokens + 20, "stop", session)
    return [start, done]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_what_was_recorded_can_be_replayed(tmp_path: Path, suffix: str) -> None:
    clock = Clock(100.0)
    path = tmp_path / f"yesterday.{suffix}"
    recorder = Recorder(path, clock=clock)
    slow, slow_done = request("slow", [1, 2], [3], "alice's secret")
    recorder("engine", [slow])
    clock.now = 101.0
    recorder("engine", request("quick", [8], [], None))
    clock.now = 105.0
    recorder("engine", [slow_done, request("lost", [9], [], None)[0]])
    recorder("engine", request("again", [1, 2, 3, 4], [], "alice's secret"))
    recorder.close()
    trace = load_trace(path)
    assert recorder.written == len(trace) == 3
    assert trace.at.tolist() == [0.0, 1.0, 5.0]
    assert trace.session.tolist()[0] == trace.session.tolist()[2] != trace.session.tolist()[1]
    assert trace.prompts.tolist() == [2, 1, 4]
    assert trace.output_tokens.tolist() == [20, 20, 20]
    # The first request's output block is part of the third one's prompt.
    for arm in ("lru", "classic"):
        assert run_arm(arm, trace, 100, Settings()).tolist() == [0, 0, 3]


def test_a_request_that_was_not_told_whole_costs_only_itself(tmp_path: Path) -> None:
    """As engines tell them while the sidecar is overloaded, or where they do not agree."""
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path)
    whole, whole_done = request("whole", [1, 2], [3], "s")
    layers = (Segment(0, 0, 16),) * MAX_SEGMENTS
    for start, done in (
        (as_tip(whole), whole_done),
        (as_tip(replace(whole, cached_tokens=32)), as_tip(whole_done)),
        (whole, as_tip(whole_done)),
        (replace(whole, hashes=whole.hashes[:8]), whole_done),
        (replace(whole, segments=layers), replace(whole_done, total_tokens=1)),
        (whole, whole_done),
    ):
        recorder("engine", [start, done])
    recorder.close()
    trace = load_trace(path)
    assert (recorder.written, recorder.left_out) == (2, 4)
    assert trace.prompts.tolist() == [2, 2]
    assert trace.output_tokens.tolist() == [0, 20]


def test_a_recording_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious")
    with pytest.raises(TraceError, match=r"r\.jsonl: cannot be written"):
        Recorder(path)
    assert path.read_text() == "precious"


def test_a_recording_that_cannot_begin_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    done = kvgraph("record", str(out), "--endpoint", "nowhere")
    assert "sidecar.endpoint = 'nowhere'" in done.stderr
    assert not out.exists()


def test_a_picture_in_an_unknown_format_is_refused(trace_file: Path, tmp_path: Path) -> None:
    table = hit_table(load_trace(trace_file), ["lru"], [40], Settings())
    with pytest.raises(ReplayError, match=r"picture '.*\.odd': Format 'odd' is not supported"):
        draw(table, tmp_path / "a.odd")


# The shared trace -------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.exists(), reason="the shared trace is not beside the repository")
def test_the_figures_that_others_measured_on_the_mooncake_trace() -> None:
    trace = load_trace(SHARED)
    assert (len(trace), trace.prompt_blocks) == (12_031, 288_500)
    for arm, row in (("lru", LRU), ("belady", BELADY)):
        for capacity, rate in row.items():
            hits = run_arm(arm, trace, capacity, Settings()).sum()
            assert hits / trace.prompt_blocks == pytest.approx(rate, abs=6e-4), (arm, capacity)


# Processes --------------------------------------------------------------------------------------

TWO_WORKERS = """
import os, signal, sys, time
from kvgraph.advisor.replay.arms import run_cells

def stay(seconds, cell):
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        time.sleep(seconds)  # as a compiled loop, which sees no interrupt

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if these tests run so
    list(run_cells(stay, 600.0, range(9), 2))
"""


def test_a_cell_keeps_to_one_core() -> None:
    def threads(shared: None, cell: int) -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    [(_, found)] = run_cells(threads, None, [0], 2)
    assert set(found) == {1}


def two_workers(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    script = folder / "two_workers.py"
    script.write_text(TWO_WORKERS)
    parent = subprocess.Popen(
        [sys.executable, "-P", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    with parent.stdout as told:
        return parent, [psutil.Process(int(told.readline())) for _ in range(2)]


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent, workers = two_workers(tmp_path)
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_an_interrupt_ends_the_cells_that_run_and_those_that_wait(tmp_path: Path) -> None:
    parent, workers = two_workers(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    try:
        assert psutil.wait_procs([*workers, psutil.Process(parent.pid)], timeout=30)[1] == []
    finally:
        parent.kill()
        parent.wait()


CAPACITY = 200


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder: Path = tmp_path_factory.mktemp("trace")
    return made(folder, agents(np.random.default_rng(3)))


def test_a_name_and_a_policy_find_what_the_table_says(trace: Trace) -> None:
    arms = ["lru", "classic", "belady"]
    table = hit_table(trace, arms, [CAPACITY], Settings(), processes=1)
    for arm in arms:
        assert hit_rate(trace, CAPACITY, arm) == table.rates[arm][CAPACITY]
    assert hit_rate(trace, CAPACITY, ClassicPolicy()) == table.rates["classic"][CAPACITY]


def test_who_is_no_policy_is_refused_by_name(trace: Trace) -> None:
    with pytest.raises(KvGraphError, match=r"'gremlin'.*lifecycle"):
        hit_rate(trace, CAPACITY, "gremlin")


@pytest.mark.parametrize(
    ("ticks", "of_each", "first", "times"),
    [
        (np.arange(20) * 3.0, 3, 0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (np.append(np.arange(19) * 3.0, 300.0), 2, 36, [54.0, 55.5, 300.0, 301.5]),
    ],
    ids=["evenly", "before a pause"],
)
def test_requests_of_one_tick_are_laid_over_it(
    ticks: Any, of_each: int, first: int, times: list[float]
) -> None:
    spread = spread_over_ticks(np.repeat(ticks, of_each))
    assert spread[first : first + len(times)].tolist() == times
    assert (np.diff(spread) > 0).all()


@pytest.mark.parametrize(
    "at",
    [
        np.sort(np.random.default_rng(3).uniform(0, 100, 200)),
        np.repeat(np.arange(50) * 0.1, 4),
        np.repeat(np.sort(np.random.default_rng(3).uniform(0, 500, 50)), 4),
        np.zeros(30),
        np.empty(0),
    ],
    ids=["no clock", "bursts on a fine clock", "bursts at any time", "one time", "none"],
)
def test_fine_or_irregular_times_are_what_they_are(at: Any) -> None:
    assert spread_over_ticks(at) is at


@pytest.mark.parametrize(
    ("chains", "sessions"),
    [
        ([[1, 2], [1, 2, 3, 4], [1, 2, 3, 9, 10], [1, 2, 3, 9, 11]], [0, 0, 0, 0]),
        ([[1, 2, 3, 4], [1, 2, 9]], [0, 1]),
        ([[1, 2, 3], [1, 4, 5], [1, 6, 7], [1, 4, 5, 8], [1]], [0, 1, 2, 1, 3]),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 9, 10], [1, 2, 3, 9, 10, 11]], [0, 1, 1]),
    ],
    ids=["edited", "half is lost", "strangers behind one prompt", "of whom one goes on"],
)
def test_a_history_continues_its_session_unless_half_of_it_is_lost(
    chains: list[list[int]], sessions: list[int]
) -> None:
    lengths = [len(chain) for chain in chains]
    assert infer_sessions(chains, lengths, 100).tolist() == sessions


def told(trace: Trace) -> tuple[SimulatedSidecar, list[str]]:
    """Two engines, each of which stored the blocks of one request at 10 s."""
    sidecar = SimulatedSidecar(trace, new_policy("lifecycle"), hints=True)
    engines = [sidecar.join(1000) for _ in range(2)]
    for request, engine in enumerate(engines):
        blocks = trace.chain(request).tolist()
        sidecar.happened(engine, EngineUpdate(10.0, sidecar.events.started(request, 0)))
        sidecar.happened(engine, EngineUpdate(10.0, sidecar.events.stored(request, 0), blocks))
    return sidecar, engines


def test_an_engines_own_news_are_heard_sooner_than_the_others() -> None:
    sidecar, (first, second) = told(chat_trace(10, seed=5))
    sidecar.hear(first, 10.1, 9.9)
    assert sidecar.graph.resident_count(first) > 0
    assert sidecar.graph.resident_count(second) == 0
    assert len(sidecar.graph.tables.sessions) == 1
    sidecar.hear(first, 10.3, 10.1)
    assert sidecar.graph.resident_count(second) > 0
    sidecar.graph.check_integrity()


def test_a_block_of_two_engines_is_one_with_two_residencies() -> None:
    trace = chat_trace(10, seed=5)
    sidecar, (first, second) = told(trace)
    sidecar.hear(first, 11.0, 11.0)
    own = [set(trace.chain(request).tolist()) for request in range(2)]
    assert sidecar.graph.resident_count(first) == len(own[0])
    assert sidecar.graph.resident_count(second) == len(own[1])
    assert len(sidecar.graph.tables.blocks) == len(own[0] | own[1])
    gone = sorted(own[0])[:1]
    sidecar.happened(first, EngineUpdate(12.0, None, gone))
    sidecar.hear(second, 13.0, 12.5)
    assert sidecar.graph.resident_count(first) == len(own[0]) - 1
    assert sidecar.graph.resident_count(second) == len(own[1])


def test_engines_that_share_a_sidecar_find_the_same_each_time() -> None:
    trace = chat_trace(150, seed=5)
    runs = []
    for _ in range(2):
        orders = new_orders(BY_DEFAULT + HINTS, trace, Settings(), 3)
        engines = [Instance(40, order) for order in orders]
        runs.append(simulate(trace, engines, router=lambda request, _: request % 3).hits.tolist())
    assert runs[0] == runs[1]
    assert sum(runs[0]) > 0


def turn(at: float, blocks: list[int], stop: str = "tool_use", out: int = 100) -> dict[str, Any]:
    return {"t": at, "type": "n", "in": 64 * len(blocks), "out": out, "hash_ids": blocks,
            "stop": stop}  # fmt: skip


def write(directory: Path, name: str, requests: list[dict[str, Any]]) -> None:
    session = {"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": requests}
    (directory / f"{name}.json").write_text(json.dumps(session))


def recorded(directory: Path, seed: int = 1, sessions: int = 20) -> None:
    rng = np.random.default_rng(seed)
    for number in range(sessions):
        at, requests = 0.0, []
        for count in range(4, 24):
            requests.append(turn(at, list(range(1, count))))
            at += float(rng.exponential(20.0))
        write(directory, f"s{number}", requests)


def test_a_context_that_nobody_extends_is_waited_for_in_vain(tmp_path: Path) -> None:
    """A compaction ends the wait of the blocks before it, although the session goes on."""
    chain = list(range(1, 20))
    write(tmp_path, "s", [turn(0, chain), turn(10, [*chain, 20]), turn(30, [1, 2, 50, 51])])
    waits = recorded_waits(read_sessions(tmp_path))
    assert waits.age.tolist() == [10.0, 3600.0, 3600.0]
    assert waits.returned.tolist() == [True, False, False]
    assert waits.features.shape == (3, len(FEATURES))
    told = np.exp(waits.features[0, STATED_FEATURE])
    assert 10.0 / 4 <= told <= 10.0 * 4
    assert np.isnan(waits.features[1:, STATED_FEATURE]).all()


def test_the_same_sessions_teach_the_same(tmp_path: Path) -> None:
    recorded(tmp_path)
    sessions = read_sessions(tmp_path)
    one, other = (learn_prior(sessions, steps=60) for _ in range(2))
    assert one.pause == other.pause
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_command_writes_what_a_policy_starts_from(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(learn_prior.__kwdefaults__, "steps", 60)
    recorded(tmp_path, sessions=3)
    out = tmp_path / "prior"  # numpy would write another file
    done = kvgraph("prior", str(tmp_path), "-o", str(out))
    assert done.returncode == 0, done.stderr
    with np.load(out) as arrays:
        assert set(arrays) == {"scales", "pause", "into", "bias", "across", "offset", "out", "base"}


def test_sessions_that_never_come_back_teach_nothing(tmp_path: Path) -> None:
    """A prior of no returns would be no number, and so would be each score."""
    one = {"t": 0.0, "type": "n", "in": 33, "out": 8, "hash_ids": [1, 2], "stop": "tool_use"}
    (tmp_path / "s.json").write_text(json.dumps({"block_size": 16, "requests": [one]}))
    with pytest.raises(TraceError, match="no session has a second turn"):
        learn_prior(read_sessions(tmp_path), steps=20)


def test_the_shipped_prior_fits_the_features() -> None:
    prior = load_prior()
    assert prior.scales.shape == (2, len(FEATURES))
    rates = np.interp([1.0, 60.0, 3000.0], AGES, Returns(prior).stranger_rates())
    assert (np.diff(rates) < 0).all(), "who was away longer is less likely to come back soon"
