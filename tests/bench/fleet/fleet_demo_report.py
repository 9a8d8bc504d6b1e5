"""How the fleet's demo ends: one table, what a killed engine cost, one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ..agents.agents_arms import AgentPass
from ..figures import quantile
from .fleet_demo import ENGINES, HOST_GIB, FleetDemo

FLEET_FILE: Final = "fleet.json"


def print_fleet(result: FleetDemo, console: Console | None = None) -> None:
    console = console or Console()
    console.print(_table(result))
    for line in _lines(result):
        console.print(line, soft_wrap=True, highlight=False)


def save_fleet(result: FleetDemo) -> Path:
    killed = result.killed
    content = {
        **result.figures().as_dict(),
        "engines": ENGINES,
        "requests": result.requests,
        "pool_blocks": result.pool,
        "pace": round(result.pace, 5),
        "shared_store": {
            **details(result.shared),
            "blocks_from_store": result.from_store,
            "blocks_from_store_after_kill": result.from_store_later,
        },
        "arms": {each.arm: details(each) for each in result.arms},
        "decisions": result.decisions,
        "killed": {
            **details(killed.passed),
            "in_flight": killed.in_flight,
            "at_the_engine_not_begun": killed.asked,
            "at_the_engine_begun": killed.begun,
            "failed_not_begun": killed.failed_before,
            "failed_begun": killed.cut,
            "sent_again": killed.status["requests"]["retried"],
            "decisions": killed.status["decisions"],
        },
    }
    path = result.out / FLEET_FILE
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _table(result: FleetDemo) -> Table:
    title = f"{result.requests} requests of recorded agents on {ENGINES} engines, in every arm"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("cached tokens", "of prompt", "TTFT p50", "p95", "failed"):
        table.add_column(column, justify="right")
    for each in (*result.arms, result.shared):
        table.add_row(each.arm, *_cells(each))
    return table


def _cells(passed: AgentPass) -> list[str]:
    p50, p95 = (f"{quantile(passed.result.ttft_ms, share):,.0f} ms" for share in (50, 95))
    tokens = f"{passed.result.cached_tokens:,}"
    return [tokens, f"{passed.share:.1%}", p50, p95, str(len(passed.failed))]


def _lines(result: FleetDemo) -> list[str]:
    killed = result.killed
    requests = killed.status["requests"]
    return [
        f"Each engine has a pool of {result.pool} blocks; agents are "
        f"{1 / result.pace:,.0f} × as fast as recorded. The first arm's requests pass through the "
        "proxy, whose time counts; the others' go straight to an engine.",
        f"In the last arm the engines share a store, by way of {HOST_GIB * 1024:.0f} MiB of host "
        f"memory each: {result.from_store} blocks came from it.",
        f"Then, without pauses, an engine was killed half way: {killed.in_flight} requests were in "
        f"flight, {killed.asked + killed.begun} of them there, {killed.begun} with an answer "
        f"begun. {len(killed.passed.failed)} failed: {killed.cut} whose answer had begun, "
        f"{killed.failed_before} others. {requests['retried']} were sent to another engine; "
        f"the engines left loaded {result.from_store_later} blocks from the store.",
        f"  {result.out / FLEET_FILE}",
    ]


def details(passed: AgentPass) -> dict[str, Any]:
    done = passed.result
    return {
        "answered": len(done.answers),
        "failed": len(passed.failed),
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "wall_s": round(done.wall_s, 2),
        "ttft_ms": {p: round(quantile(done.ttft_ms, p), 1) for p in (50, 90, 95, 99)},
    }
