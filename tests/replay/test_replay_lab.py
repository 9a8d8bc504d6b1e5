"""The lab's commands: table, JSON, picture, report, analysis, approaches, tuning, recording."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvgraph.advisor.cli import main
from kvgraph.advisor.config import config
from kvgraph.advisor.replay.analysis import analyze
from kvgraph.advisor.replay.arms import Settings, run_arm, run_cells
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.tables import HitTable, hit_table
from kvgraph.advisor.replay.trace import TraceError
from kvgraph.graph.types import EdgeType, as_keys
from kvgraph.graph.wire.events import RequestFinished, RequestStarted
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


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_names_every_policy_and_capacity(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(
        capsys, "replay", trace_file, "--capacity", "40,100", "--processes", 1,
        "--policy", "lru,classic,classic+hints,belady", "--json",
    )  # fmt: skip
    assert found["trace"] == "small.jsonl"
    assert set(found["policies"]) == {"lru", "classic", "classic+hints", "belady"}
    for row in found["policies"].values():
        assert list(row) == ["40", "100"]
        assert 0 <= row["40"] <= row["100"] <= 1
    assert found["policies"]["belady"]["40"] >= found["policies"]["lru"]["40"]
    assert found["seconds"] > 0


def test_two_processes_find_what_one_finds(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", trace_file, "--capacity", "50", "--policy", "lru,classic,arc", "--json"]
    one = run_json(capsys, *arguments, "--processes", 1)
    two = run_json(capsys, *arguments, "--processes", 2)
    assert one["policies"] == two["policies"]


def test_a_picture_and_a_report_are_written(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, page = tmp_path / "band.png", tmp_path / "report.html"
    run_json(
        capsys, "replay", trace_file, "--capacity", "40,100", "--policy", "lru,belady",
        "--processes", 1, "--picture", picture, "--report", page, "--json",
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "Losses of LRU at 40 blocks" in text
    assert "data:image/png;base64," in text


def test_a_table_is_shown_to_people(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trace_file), "--capacity", "40", "--policy", "lru", "--processes", "1"])
    assert ended.value.code == 0
    assert "lru" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--capacity", "0"], "--capacity '0'"),
        (["--capacity", "many"], "--capacity 'many'"),
        (["--policy", "wishful"], "policy 'wishful'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_1(
    trace_file: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trace_file), *arguments])
    assert ended.value.code == 1
    assert problem in capsys.readouterr().err


def test_equal_columns_are_pointed_out(trace_file: Path) -> None:
    from kvgraph.advisor.replay.tables import hit_table

    trace = load_trace(trace_file)
    table = hit_table(trace, ["lru", "session-tail"], [40, 60, 80], Settings(), processes=1)
    assert table.notes == ["lru and session-tail are equal at every capacity"]


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


def test_analysis_command(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "replay", trace_file, "--analyze", "--capacity", "40", "--json")
    assert found["losses"]["40"]["infinite_hit_rate"] > found["losses"]["40"]["lru_hit_rate"]


def refused(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_what_a_replay_would_leave_out_without_a_word_is_refused(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(trace_file, "--analyze", "--policy", "all") == 1
    assert "--analyze goes without --policy" in capsys.readouterr().err
    assert refused(trace_file, "--approaches", "--report", tmp_path / "a.html") == 1
    assert "--approaches goes without --report" in capsys.readouterr().err
    assert refused(trace_file, "--block-size", 0) == 2
    capsys.readouterr()
    assert refused(trace_file, tmp_path / "second.jsonl", "--policy", "lru") == 1
    assert "second.jsonl: there is no such file" in capsys.readouterr().err


def test_a_sidecars_configuration_ranks_in_the_lab_too(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["replay", trace_file, "--policy", "classic", "--capacity", 60, "--json"]
    free, other = tmp_path / "free.toml", tmp_path / "other.toml"
    free.write_text("[policy]\nguard = false\n")
    other.write_text("[policy]\nguard = false\n[score]\nage = -1.0\nhit_count = 40.0\n")
    rates = [
        run_json(capsys, *asked, "--config", each)["policies"]["classic"]["60"]
        for each in (free, other)
    ]
    assert rates[0] > rates[1], "what was used last goes first"
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[score]\nages = 1\n")
    assert refused(trace_file, "--config", wrong) == 1


def test_a_table_says_what_its_reader_would_not_guess(trace_file: Path) -> None:
    trace = load_trace(trace_file)
    arms = ["lru", "classic", "default+hints", "default+stops"]
    notes = " ".join(hit_table(trace, arms, [5, 6, 7], Settings(), processes=1).notes)
    assert "takes from the future which request is its session's last" in notes
    assert "does not say why answers ended" in notes
    assert "prompts have more than 5 blocks" in notes


def test_approaches_are_compared(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(
        capsys, "replay", trace_file, "--approaches", "--instances", 2, "--capacity", "80", "--json"
    )
    rows = {row["approach"]: row for row in found["approaches"]}
    assert len(rows) == 10
    assert rows["A + B"]["host_rate"] > 0
    assert rows["round-robin, LRU"]["hit_rate"] < rows["prefix-affinity, LRU"]["hit_rate"]


def test_tuning_searches_the_first_part_and_writes_what_a_sidecar_loads(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned.toml"
    arguments = ["tune", trace_file, "--trials", 3, "--capacity", "60", "--out", out, "--json"]
    found = run_json(capsys, *arguments)
    assert run_json(capsys, *arguments)["weights"] == found["weights"]
    tuned = config.load(out)
    assert tuned.score.weights().age == found["weights"]["age"]
    assert tuned.rules().edge_types[EdgeType.TEMPORAL] == found["weights"]["edge_types.temporal"]
    assert set(found["untouched"]) == {
        "lru", "lifecycle", "classic, defaults", "classic, tuned",
    }  # fmt: skip


# Recording --------------------------------------------------------------------------------------


def request(name: str, keys: list[int], outputs: list[int], session: str | None) -> list[Any]:
    hashes, written = as_keys(keys).tobytes(), as_keys(outputs).tobytes()
    tokens = 16 * len(keys) + 3
    start = RequestStarted(name, hashes, tokens, 0, 16, session)
    done = RequestFinished(name, hashes + written, tokens, tokens + 20, "stop", session)
    return [start, done]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_what_was_recorded_can_be_replayed(tmp_path: Path, suffix: str) -> None:
    now = [100.0]
    path = tmp_path / f"yesterday.{suffix}"
    recorder = Recorder(path, clock=lambda: now[0])
    slow, slow_done = request("slow", [1, 2], [3], "alice's secret")
    recorder("engine", [slow])
    now[0] = 101.0
    recorder("engine", request("quick", [8], [], None))
    now[0] = 105.0
    recorder("engine", [slow_done, request("lost", [9], [], None)[0]])
    recorder("engine", request("again", [1, 2, 3, 4], [], "alice's secret"))
    recorder.close()
    trace = load_trace(path)
    assert recorder.requests == len(trace) == 3
    assert trace.at.tolist() == [0.0, 1.0, 5.0]
    assert trace.session.tolist()[0] == trace.session.tolist()[2] != trace.session.tolist()[1]
    assert trace.prompts.tolist() == [2, 1, 4]
    assert trace.output_tokens.tolist() == [20, 20, 20]
    # The first request's output block is part of the third one's prompt.
    assert run_arm("lru", trace, 100, Settings()).tolist() == [0, 0, 3]
    assert run_arm("classic", trace, 100, Settings()).tolist() == [0, 0, 3]


def test_a_recording_holds_no_names_and_no_engine_hashes(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path)
    recorder("engine", request("q", [123456789], [], "alice's secret"))
    recorder.close()
    text = path.read_text()
    assert "alice" not in text
    assert "123456789" not in text


def test_a_recording_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious")
    with pytest.raises(TraceError, match=r"r\.jsonl: cannot be written"):
        Recorder(path)
    assert path.read_text() == "precious"


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
import os, sys, time
from kvgraph.advisor.replay.arms import run_cells

def stay(seconds, cell):
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    time.sleep(seconds)

if __name__ == "__main__":
    list(run_cells(stay, 600.0, range(2), 2))
"""


def test_a_cell_keeps_to_one_core() -> None:
    def threads(shared: None, cell: int) -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    [(_, found)] = run_cells(threads, None, [0], 2)
    assert set(found) == {1}


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "two_workers.py"
    script.write_text(TWO_WORKERS)
    parent = subprocess.Popen([sys.executable, "-P", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as told:
        workers = [psutil.Process(int(told.readline())) for _ in range(2)]
        parent.kill()
        parent.wait()
        assert psutil.wait_procs(workers, timeout=30)[1] == []
