"""What ``kvgraph status`` prints, on terminals of any width."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph.advisor.tools.terminal import hashing_warnings, status_report
from kvgraph.graph.wire.events import TierReport
from msgspec.structs import fields
from rich.console import Console

LAYERS = ("axioms", "rules", "capabilities", "generation")


def engine(number: int) -> dict[str, Any]:
    """An engine as in ``/status``; its name differs from others' at the very end."""
    return {
        "name": f"node-with-a-long-name-17.rack.example:41000 rank {number}",
        "model": "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "state": "synced",
        "ruling": {"policy_rules": True, "ahead": 12345.0},
        "ranked_by": "lifecycle",
        "ranking_age_s": 0.31,
        "gaps": 3,
        "hashing": f"blocks of 16 tokens, sha256 {number}",
        "room": None,
        "tiers": None,
        "graph": {
            "resident": 235_123,
            "applied": {"moved": 123_456, "dropped": 12},
            "layers": dict.fromkeys(LAYERS, 123_456),
        },
    }


def shown(engines: list[dict[str, Any]], width: int, counters: dict[str, int] | None = None) -> str:
    status = {
        "version": "1", "pid": 7, "http": "http://127.0.0.1:8420", "endpoint": "ipc:///x",
        "graph": {"blocks": 1, "bytes": 1, "edges": {}, "sessions": {}, "counters": counters or {}},
        "counters": {"ingest": {}}, "snapshot": {"error": None}, "config": {"error": None},
        "engines": engines,
    }  # fmt: skip
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(status_report(status))
    return capture.get()


def column(text: str, title: str, number: int) -> str:
    """All that stands in one column of the tables of one title, in a row."""
    found = ""
    for table in text.split(f"{title} ")[1:]:
        for line in table.splitlines():
            cells = line.replace("┃", "│").split("│")
            found += cells[number].strip() if len(cells) > number else ""
            if line.startswith("└"):
                break
    return found.replace(" ", "")


@pytest.mark.parametrize("engines", [1, 3, 7])
@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_name_is_cut(engines: int, width: int) -> None:
    text = shown([engine(number) for number in range(engines)], width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    names = [engine(number)["name"].replace(" ", "") for number in range(engines)]
    assert all(name in column(text, "engines", 1) for name in names)
    above = "".join(column(text, "resident blocks by layer", each) for each in range(2, 9))
    assert all(name in above for name in names)
    assert "235123" in text
    ranks = "lifecycle(policy12,345blocksaheadofLRU)"
    assert any(ranks in column(text, "engines", place) for place in (2, 4)), "as facts, or columns"


def test_without_engines() -> None:
    assert "no engine is connected" in shown([], 80)


@pytest.mark.parametrize(("reads", "left"), [(True, False), (False, True)])
def test_what_a_shared_store_did_is_told_where_there_is_one(reads: bool, left: bool) -> None:
    alone = engine(0) | {"tiers": {each.name: 0 for each in fields(TierReport)}}
    alone["graph"]["pressure"] = None
    assert "shared store" not in shown([alone], 120)
    alone["tiers"] |= {"reads_store": reads, "shared": 1234, "store_loaded": 56}
    said = " ".join(shown([alone], 200).split())
    assert "1,234 blocks given (0 failed), 56 loaded (0 promised and not given)" in said
    assert ("until the engine is started again" in said) is left


def test_how_blocks_are_told_apart_is_shown_and_compared_across_sidecars() -> None:
    engines = [engine(0), engine(1)]
    assert "blocks of 16 tokens, sha256 1" in shown(engines, 200)
    (said,) = hashing_warnings(engines)
    assert "Meta-Llama-3.1-70B-Instruct' hash blocks differently" in said
    assert hashing_warnings([engine(1), engine(1)]) == []


def test_what_recall_brought_back_is_told_once_there_is_any() -> None:
    assert "recall" not in shown([engine(0)], 120)
    text = shown([engine(0)], 120, {"requests_spliced": 12, "tokens_spliced": 34_567})
    assert "34,567 tokens came back at other positions, in 12 requests" in text
