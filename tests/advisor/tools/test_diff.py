"""``kvgraph diff``: what is told of two recordings, or of two stretches of time."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import kvgraph
from kvgraph.advisor.tools.activity import Activity, Minute, origin_of
from kvgraph.advisor.tools.diff import Sums, movers, rows, stretch, sums_of, words
from kvgraph.graph.errors import ConfigError
from page_sidecar import TOKEN, PageSidecar
from small_world import LoggedWorld

ENVIRONMENT = {**os.environ, "KVGRAPH_SIDECAR__TOKEN": TOKEN, "COLUMNS": "120"}


def recording(path: Path, evicts: bool) -> str:
    """One session's turns, an hour apart; in between its blocks stay, or go and are regretted."""
    world = LoggedWorld(path)
    for turn in range(4):
        found = 0 if turn == 0 else 1 if evicts else 3
        world.serve(1, 2, 3, found=found)
        if evicts:
            world.evict(3, 2)
        world.now += 3600 if turn == 1 else 60
    world.close()
    return str(path)


@pytest.fixture
def both(tmp_path: Path) -> tuple[str, str]:
    return recording(tmp_path / "kept", False), recording(tmp_path / "lost", True)


def sums(name: str) -> Sums:
    return sums_of(stretch(name, lambda origin: origin_of(origin).activity()))


def test_sums_are_what_happened(both: tuple[str, str]) -> None:
    kept, lost = map(sums, both)
    assert (kept.requests, kept.session_count, kept.asked) == (4, 1, 12)
    assert [(each.blocks or {}).get("pool") for each in (kept, lost)] == [9, 3]
    assert [(each.blocks or {}).get("computed") for each in (kept, lost)] == [3, 9]
    assert kept.share == pytest.approx(9 * 16 / (4 * 53))
    assert kept.reasons == {"never_seen": (1, 3), "not_cacheable": (3, 0)}
    assert lost.reasons == {"never_seen": (1, 3), "evicted": (3, 6)}
    assert (kept.evicted, lost.evicted, lost.wanted) == (0, 8, 4)
    assert lost.left_by_layer == {"user_turn": 8}
    assert lost.computed_by == {"s": 9}
    assert kept.regret is None
    assert lost.regret == 0.5


def test_what_moved_most_is_told_first(both: tuple[str, str]) -> None:
    kept, lost = map(sums, both)
    moved = [(each.what, round(12 * each.by)) for each in movers(kept, lost)]
    assert moved == [
        ("evictions of user_turn", 8),
        ("computed because of evicted", 6),
        ("computed by session s", 6),
    ]
    said = words(kept, lost)
    assert said[0].startswith("lost found 22.6% of its prompt tokens, kept 67.9%: 45.3 points less")
    assert "Evictions of user_turn rose from 0.0 to 66.7 blocks per 100 asked for." in said
    assert any("it was here, and left the pool" in each for each in said)
    figures = {row.name: (row.before, row.after) for row in rows(kept, lost)}
    assert figures["missed: evicted, requests"] == (0, 3)
    assert figures["… wanted again in ten minutes"] == (0, 4)


def test_equals_are_told_as_equal(both: tuple[str, str]) -> None:
    kept = sums(both[0])
    assert words(kept, kept) == ["kept found 67.9% of its prompt tokens, kept 67.9%: as much."]
    assert movers(kept, kept) == []


def test_stretches_of_one_recording(both: tuple[str, str]) -> None:
    first, second = (sums(f"{both[1]}@{stretch}") for stretch in ("0m..30m", "30m..2h"))
    assert (first.requests, second.requests) == (2, 2)
    assert (first.evicted, second.evicted) == (4, 4)
    assert (first.wanted, second.wanted) == (2, 2)
    for wrong in ("30m..30m", "2h..1h"):
        with pytest.raises(ConfigError, match="runs backwards"):
            sums(f"{both[1]}@{wrong}")


def test_who_is_silent_is_told(both: tuple[str, str]) -> None:
    kept, silent = sums(both[0]), sums(f"{both[0]}@20h..21h")
    assert words(kept, silent)[0].startswith("No request is known in ")


def test_minutes_tell_where_records_do_not_reach() -> None:
    """Two hours at a rate at which the log of requests holds a quarter of an hour."""
    reasons = {"evicted": 100, "never_seen": 20}
    minutes = [
        Minute(1e9 + 60 * n, 16_000, 8_000 if n < 60 else 12_000, 1_000, 300, 30, reasons,
               {"evicted": 400 if n < 60 else 200, "never_seen": 100})
        for n in range(120)
    ]  # fmt: skip
    end = 1e9 + 7200
    whole = Activity("x", end - 900, end, {}, [], [], [], [], True, [], minutes, end - 900)
    first = sums_of(whole.between(1e9, 1e9 + 3600, "first"))
    second = sums_of(whole.between(1e9 + 3600, end, "second"))
    assert (first.share, second.share) == (0.5, 0.75)
    assert first.reasons == {"evicted": (6_000, 24_000), "never_seen": (1_200, 6_000)}
    assert (first.evicted, first.wanted, first.session_count) == (18_000, 1_800, None)
    said = words(first, second)
    assert "Computed because of evicted fell from 40.0 to 20.0 blocks per 100 asked for" in said[2]
    figures = {row.name: (row.before, row.after) for row in rows(first, second)}
    assert figures["… pool"] == (None, None)
    last = sums_of(whole.between(end - 600, end, "last"))
    assert (last.requests, last.session_count) == (0, 0)


def test_blocks_of_two_sizes_are_not_compared_in_silence(
    both: tuple[str, str], tmp_path: Path
) -> None:
    small, large = sums(both[0]), sums(both[0])
    large = replace(large, name="large", block_sizes=frozenset({512}))
    assert "Blocks have 16 tokens in kept, and 512 in large" in words(small, large)[1]
    assert not any(each.startswith("Blocks have") for each in words(small, small))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvgraph("diff", *arguments, environment=ENVIRONMENT)


def test_a_table_and_words_or_json(both: tuple[str, str]) -> None:
    done = run(*both)
    assert done.returncode == 0, done.stderr
    assert "lost found 22.6% of its prompt tokens" in done.stdout
    assert "-45.3 points" in done.stdout
    assert "note: A raw log holds no rankings" in done.stdout
    data = json.loads(run(*both, "--json").stdout)
    assert data["moved"][0]["what"] == "evictions of user_turn"
    assert len(data["unknown"]) == 1
    narrow = kvgraph("diff", *both, environment={**ENVIRONMENT, "COLUMNS": "40"})
    assert max(map(len, narrow.stdout.splitlines())) <= 40


def test_two_stretches_of_a_running_sidecar(busy_sidecar: PageSidecar) -> None:
    done = run("1h..now", f"{busy_sidecar.url}@30m..now", "--url", busy_sidecar.url, "--json")
    assert done.returncode == 0, done.stderr
    figures = {each["name"]: each for each in json.loads(done.stdout)["figures"]}
    assert figures["requests"]["before"] == figures["requests"]["after"] == 48
    assert figures["evictions"]["before"] > 0
    before = run("2h..1h", "1h..now", "--url", busy_sidecar.url)
    assert "No request is known in 2h..1h" in before.stdout
    assert "2h..1h begins before what is known" in before.stdout
    assert "1h..now it is not known yet" in " ".join(before.stdout.split())


def test_failures_are_one_line(both: tuple[str, str]) -> None:
    for arguments, said in (
        (("nowhere", both[0]), "cannot be read"),
        (("1h..2h", "1h..now", "--url", "http://127.0.0.1:1"), "no sidecar answers"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
