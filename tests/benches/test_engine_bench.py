"""``kvgraph bench engine``: what is counted, what is fed, and what may be claimed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from kvgraph.bench.engine import engine
from kvgraph.bench.engine.engine import (
    GRAPH,
    STOCK,
    TIERS,
    Record,
    Scale,
    add_engine_figures,
    floor,
    ratios,
    verdict,
)
from kvgraph.bench.engine.engine_course import Course
from kvgraph.bench.engine.engine_feed import SESSIONS, SessionFeed
from kvgraph.bench.engine.engine_profile import read_profile
from kvgraph.bench.engine.engine_rounds import Round, Rounds
from kvgraph.bench.engine.engine_threads import EngineThreads
from kvgraph.bench.errors import ServerError
from kvgraph.bench.figures import Figures
from kvgraph.bench.sidecars.sidecar_process import SidecarProcess, wait_until
from rich.console import Console

BUSY = """
import sys, threading, time
from kvgraph.hooks.threads import shown
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass
def ours():
    burn(0.2)
    print("ours", flush=True); time.sleep(600)
def others():
    burn(0.4)
    print("others", flush=True); time.sleep(600)
for each, name in ((shown(ours), "kvgraph-client"), (others, "worker")):
    threading.Thread(target=each, name=name, daemon=True).start()
burn(0.1)
print("main", flush=True)
time.sleep(600)
"""


@pytest.fixture
def busy() -> Iterator[int]:
    """A process with a main thread, one of ours and one of a model's, and an engine core's title;
    what they had to do is done."""
    command = [sys.executable, "-P", "-c", BUSY, "VLLM::EngineCore"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            done = {child.stdout.readline().strip() for _ in range(3)}
            assert done == {"main", "ours", "others"}
            yield child.pid
        finally:
            child.kill()


def test_the_main_thread_and_ours_are_counted_and_no_others(busy: int) -> None:
    threads = EngineThreads([1, busy]).by_thread()
    assert threads.keys() == {"main", "kvgraph-client"}
    assert threads["kvgraph-client"] >= 0.2
    assert EngineThreads([busy]).cpu_s() == pytest.approx(sum(threads.values()), abs=0.05)
    whole = psutil.Process(busy).cpu_times()
    assert sum(threads.values()) + 0.4 <= whole.user + whole.system + 0.05


def test_a_server_without_an_engine_core_is_told() -> None:
    with pytest.raises(ServerError, match="0 processes of this server are an engine core"):
        EngineThreads([1])


# Where a busy main thread's time goes ------------------------------------------------------------

LOOPING = """
import signal, sys, time
from pathlib import Path
from kvgraph.bench.engine.own_times import OwnTimes

def module(name, source, **known):
    known.update(__name__=name, time=time, signal=signal)
    exec(source, known)
    return known

BURN = '''
def {}(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        next = time.thread_time() + .001
        while time.thread_time() < next: pass
        signal.raise_signal(signal.SIGPROF)  # the kernel's tick alone may come .6 s late here
'''
schedule = module("vllm.scheduler", BURN.format("schedule"))["schedule"]
move = module("vllm.queue", BURN.format("move"))["move"]
observe = module("kvgraph.hooks.step", BURN.format("observe"))["observe"]
apply = module("kvgraph.hooks.advice", "def apply(seconds): move(seconds)", move=move)["apply"]

def run_busy_loop():
    for _ in range(20):
        schedule(.04), move(.01), observe(.01), apply(.02)
    print("done", flush=True)
    while True:
        schedule(.01)

OwnTimes(Path(sys.argv[1])).start()
schedule(.3)
run_busy_loop()
"""


def test_own_times_are_of_the_busy_loop_by_who_called(tmp_path: Path) -> None:
    kept = tmp_path / "own_times.json"
    command = [sys.executable, "-P", "-c", LOOPING, str(kept)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "done\n"
            assert wait_until(lambda: total(kept) > 1.7, 30), "the loop goes on"
        finally:
            child.kill()
    profile = read_profile(kept)
    assert [row.function for row in profile.rows[:3]] == [
        "vllm.scheduler.schedule",
        "vllm.queue.move",
        "kvgraph.hooks.step.observe",
    ]
    assert profile.first_of_ours == 3
    _, moved, observed, *_ = (row.share for row in profile.rows)
    assert moved == pytest.approx(3 * observed, rel=0.3)
    assert profile.called_share == pytest.approx(3 * observed, rel=0.3), "not all that moved"
    assert "  3  " in profile.lines(1)[1], "our first is shown wherever it stands"


def total(kept: Path) -> float:
    """Seconds in a profile, 0 where there is none yet."""
    return sum(seconds for *_, seconds in json.loads(kept.read_text())) if kept.exists() else 0.0


def test_an_engine_that_was_never_busy_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="not busy for long enough"):
        read_profile(tmp_path / "nothing.json")


# What may be claimed ----------------------------------------------------------------------------


def rounds(**cpu: list[float]) -> Rounds:
    return {arm: [Round(1000, 2.0, each) for each in found] for arm, found in cpu.items()}


def test_an_arm_is_held_to_both_stock_servers_of_its_pair() -> None:
    found = rounds(stock=[1.0, 2.0], stock_again=[3.0, 2.0], graph=[2.2, 2.2])
    cpu = ratios(found, GRAPH, STOCK, lambda each: each.cpu_per_1000)
    assert cpu == pytest.approx([1.1, 1.1])


def test_nothing_is_claimed_that_stock_differs_from_itself_by() -> None:
    stock, again = [1.0] * 9, [0.98, 1.01, 1.0, 1.0, 1.0, 1.0, 1.0, 1.01, 1.0]
    small = rounds(stock=stock, stock_again=again, graph=[1.015] * 9)
    assert floor(small) == pytest.approx(0.02)
    assert verdict(small).endswith("no difference is shown")
    large = rounds(stock=stock, stock_again=again, graph=[1.04] * 9, tiers=[0.9] * 9)
    assert [line.split(":")[0] for line in verdict(large).splitlines()] == [GRAPH, TIERS]
    assert all(line.endswith("this is a difference") for line in verdict(large).splitlines())


def test_the_figures_have_the_names_that_are_to_be_reached() -> None:
    figures = Figures("engine")
    add_engine_figures(figures, rounds(stock=[1.0], stock_again=[1.0], graph=[1.004], tiers=[1.02]))
    shown = json.loads(figures.to_json())["figures"]
    assert shown["engine_cpu_ratio"]["value"] == 1.004
    assert shown["engine_cpu_ratio_tiers"]["value"] == 1.02
    assert shown["engine_cpu_ratio_stock"]["value"] == 1
    assert shown["graph_engine_cpu"]["unit"] == "CPU s / 1,000 tok"
    assert "throughput_ratio" in shown


def test_what_was_measured_is_kept_as_it_comes(tmp_path: Path) -> None:
    raw = tmp_path / "engine.json"
    record = Record(Scale(), Course(60, Console(quiet=True)), raw)
    for arm in (STOCK[0], GRAPH, STOCK[1], TIERS, STOCK[0]):
        record.note(arm, Round(1000, 2.0, 1.0))
    kept = json.loads(raw.read_text())
    assert kept["figures"]["complete"]["value"] is False
    assert kept["figures"]["engine_cpu_ratio"]["n"] == 1, "of whole pairs only"
    assert len(kept["rounds"][STOCK[0]]) == 2
    record.feeds["sidecar_cpu_250"] = [7.0], ""
    record.is_complete = True
    record.save()
    kept = json.loads(raw.read_text())["figures"]
    assert (kept["sidecar_cpu_250"]["value"], kept["complete"]["value"]) == (7.0, True)


def test_an_interrupted_run_gives_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> list[float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "sidecar_cpu_percent", interrupted)
    raw = tmp_path / "engine.json"
    figures = engine.run(progress=False, raw=raw, part=engine.Part.SIDECAR)
    assert figures.figures["complete"].value is False
    assert (
        "a sidecar hears of 200 requests/s of 250 blocks" in json.loads(raw.read_text())["seconds"]
    )


def test_servers_are_not_started_again_where_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, started = [0.0], []

    def slow(plans: object, pairs: int, course: Course, share: float, note: object) -> None:
        started.append(share)
        with course.part("servers start"):
            now[0] += 250.0

    monkeypatch.setattr(engine, "rounds_in_turns", slow)
    for minutes, starts in ((8.0, 1), (14.0, 2)):
        now[0] = 0.0
        started.clear()
        course = Course(60 * minutes, Console(quiet=True), lambda: now[0])
        record = Record(Scale(minutes=minutes), course)
        engine.make_rounds(record, "no model", sidecars_follow=True)
        assert len(started) == starts


def test_what_is_repeated_ends_with_its_share_of_the_time() -> None:
    times = iter([0.0, 10.0, 40.0, 41.0, 85.0])
    course = Course(100.0, Console(quiet=True), lambda: next(times))
    with course.part("rounds"):
        pass
    assert course.took == {"rounds": 30.0}
    assert course.has_time_for(8.0, share=0.5)
    assert not course.has_time_for(20.0)


@pytest.mark.usefixtures("vllm_loaded")
def test_a_core_whose_wake_up_was_lost_looks_again(tmp_path: Path) -> None:
    import zmq
    from kvgraph.bench.engine.sleeping_executor import sleep_briefly
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    context = zmq.Context()
    condition = SpinCondition(True, context, f"ipc://{tmp_path}/nobody-writes")
    sleep_briefly(condition)
    condition.wait()  # as vLLM waits: for ever
    context.destroy(linger=0)


# What a sidecar is fed --------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 4])
def test_a_sidecar_knows_what_the_feed_says_is_there(turns: int, socket_directory: Path) -> None:
    with (
        SidecarProcess(socket_directory) as sidecar,
        SessionFeed(sidecar.endpoint, blocks=20, turns=turns) as feed,
    ):
        assert wait_until(lambda: feed.client.standing.linked, 30)
        shared = len(feed.resident()) // 8  # what all sessions begin with is there already
        for number in range(12 * SESSIONS // 5):
            feed.step()
            if number % 40 == 0:
                time.sleep(0.01)
        assert wait_until(lambda: counted(sidecar).get("requests") == 12 * SESSIONS, 30)
        resident = np.frombuffer(feed.resident(), dtype="<u8")
        assert wait_until(lambda: held(sidecar) == len(resident), 30), held(sidecar)
        counters = counted(sidecar)
        assert feed.client.dropped == 0
    assert len(set(resident.tolist())) == len(resident) == feed.num_blocks - 1, "the pool is full"
    assert counters["blocks_removed"] == counters["blocks_stored"] - len(resident) + shared
    found = counters["cached_tokens"] / counters["prompt_tokens"]
    assert found == 0 if turns == 1 else 0.5 < found < 0.9, found


def counted(sidecar: SidecarProcess) -> dict[str, int]:
    counters: dict[str, int] = sidecar.status()["graph"]["counters"]
    return counters


def held(sidecar: SidecarProcess) -> int:
    engines = [each["graph"] for each in sidecar.status()["engines"]]
    return int(engines[0]["resident"]) if engines and engines[0] else 0
