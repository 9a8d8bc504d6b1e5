"""What is found: recorded coding agents on stock, with nothing said, and told everything.

``--part found`` plays them on vLLM's own scheduler and cache manager by a simulated clock, which
takes a minute and is the same on every machine. ``--part hits`` plays them on a real engine: stock
is first asked everything one by one, as fast as it can, so that the pace is found at which users
who work in parallel keep this machine busy and do not overload it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
from kvgraph.graph.types import SourceLayer

from ..agents.agents_arms import (
    DEFAULT,
    KEPT_BACK,
    STOCK,
    AgentArm,
    AgentPass,
    Room,
    Sender,
    Telling,
    layers_by_block,
    longest,
    pool_for,
    watched,
)
from ..closed.on_paper.open_paper import OpenRun, alone_s, play_open
from ..closed.on_paper.paper_loop import PAPER_HOLD, PAPER_STOCK, PAPER_TOLD, PaperArm
from ..figures import Figures, quantile
from ..paper.paper_engine import BLOCK_SIZE, base_config
from ..paper.quiet import only_errors
from ..recorded.agents_requests import SESSIONS, USERS, AgentRequest, pace_of, recorded_requests
from ..serving.cache_ledger import Books, Digest, Tally
from ..serving.completions import PassResult
from ..serving.model import TINY, ModelShape, ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server
from ..serving.workload import BLOCK
from .page_demo import ENDPOINT, LivePage

REQUESTS: Final = 600
SEED: Final = 1

STOCK_FINDS: Final = 0.6
"""Share of the prompt that stock finds, one request after the other: it makes the pool's size."""

RUNNING: Final = 1
"""Requests that run at once: more would hold most of so small a pool while they run."""

HAD: Final = {
    "stock": "vLLM alone",
    "nothing said": "the switch alone",
    "told everything": "the switch, signals, layers",
}  # what each arm has, stock first

PRICE_FIELD: Final = "protection_price_points"  # of a sidecar's status

_SILENT = replace(PAPER_HOLD, name="nothing said")
_TOLD = replace(PAPER_TOLD, name="told everything", layered=True)
PAPER_ARMS: Final = (PAPER_STOCK, _SILENT, _TOLD)
ENGINE_ARMS: Final = (
    STOCK,
    replace(DEFAULT, name="nothing said"),
    AgentArm("told everything", graph=True, telling=Telling(hinted=True, layered=True)),
)


@dataclass(frozen=True, slots=True)
class ArmResult:
    arm: str  # A key of ``HAD``
    passed: AgentPass
    tally: Tally
    # what protection costs of the share found, in points; None: nobody said
    price_points: float | None = None

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that came out of the prefix cache."""
        return self.passed.share

    @property
    def ttft_ms(self) -> list[float]:
        return self.passed.result.ttft_ms


@dataclass(frozen=True, slots=True)
class DemoResult:
    name: str  # of the part, and of its files
    made_by: str  # what played the requests
    out: Path
    requests: int
    pool: int  # KV blocks that every arm got
    pace: float  # seconds that a recorded second took
    arms: tuple[ArmResult, ...]

    def add_to(self, figures: Figures) -> None:
        stock, _, told = self.arms
        shares = [arm.hit_rate for arm in self.arms]
        for name, share in zip(("stock", "nothing_said", "told"), shares, strict=True):
            figures.add(f"{name}_share", share, "share of prompt")
        figures.add("hit_gain_points_no_hints", 100 * (shares[1] - shares[0]), "points", "> 0")
        figures.add("hit_gain_points", 100 * (shares[2] - shares[0]), "points", "> 0")
        figures.add("told_over_nothing_said", 100 * (shares[2] - shares[1]), "points", "> 0")
        figures.add("protected_lost", told.tally.protected_lost, "blocks", "0, or the table's why")
        figures.add("protected_computed_again", told.tally.protected_again, "blocks")
        figures.add("stock_protected_lost", stock.tally.protected_lost, "blocks", "> 0")
        if told.price_points is not None:
            figures.add(PRICE_FIELD, told.price_points, "points", "≤ 0.5")
        for percentile in (50, 95):
            ratio = quantile(told.ttft_ms, percentile) / quantile(stock.ttft_ms, percentile)
            figures.add(f"ttft_p{percentile}_ratio", ratio, "told / stock")


def run_found(out: Path, shown: DemoProgress, requests: int = REQUESTS) -> DemoResult:
    """Play all arms by the simulated clock, and *told everything* once more without protection:
    the difference is what that costs.
    """
    vocabulary = ModelShape().vocab
    asked = recorded_requests(SESSIONS, USERS, SEED, requests, vocabulary)
    pool = _pool(asked, out) * BLOCK // BLOCK_SIZE
    known = layers_by_block(asked, vocabulary, BLOCK_SIZE)
    with only_errors():
        base = base_config(ensure_model(TINY))
        pace = pace_of(alone_s(base, pool, asked), asked)

        def play(arm: PaperArm, how: str) -> tuple[OpenRun, Tally]:
            shown.passing(arm.name, how)
            books = Books(known)
            return play_open(base, arm, pool, asked, pace, RUNNING, books), books.tally

        done = [_on_paper(*play(arm, "by a simulated clock")) for arm in PAPER_ARMS]
        free, _ = play(replace(_TOLD, unprotected=True), "the same without protection")
    told = done[-1]
    done[-1] = replace(told, price_points=100 * (free.cached_share - told.hit_rate))
    made_by = "vLLM's own scheduler and cache manager, by a simulated clock"
    return DemoResult("found", made_by, out, len(asked), pool, pace, tuple(done))


def run_hits(
    model: str | None, out: Path, shown: DemoProgress, page: LivePage | None = None
) -> DemoResult:
    name = model or str(ensure_model())
    vocabulary = vocabulary_size(name)
    requests = recorded_requests(SESSIONS, USERS, SEED, REQUESTS, vocabulary)
    pool = _pool(requests, out)
    room = Room(name, out, pool, longest(requests))
    known = layers_by_block(requests, vocabulary)
    arms, pace = _run_arms(room, requests, known, shown, page)
    made_by = f"a real vLLM, {1 / pace:,.0f} × recorded speed"
    return DemoResult("hits", made_by, out, len(requests), pool, pace, arms)


def price_in(status: Any) -> float | None:
    """What a sidecar's status says that protection costs, wherever it stands; None: nothing."""
    if isinstance(status, Mapping):
        price = status.get(PRICE_FIELD)
        if isinstance(price, int | float):
            return float(price)
        status = list(status.values())
    if isinstance(status, list):
        return next((found for each in status if (found := price_in(each)) is not None), None)
    return None


def _pool(requests: Sequence[AgentRequest], out: Path) -> int:
    least = longest(requests) // BLOCK + KEPT_BACK
    return pool_for(requests, STOCK_FINDS, least, out / "fleet.jsonl.gz")


def _on_paper(run: OpenRun, tally: Tally) -> ArmResult:
    answers = tuple(each.answer for each in run.answers)
    sent = tuple(each.sent_s for each in run.answers)
    return ArmResult(run.arm, AgentPass(PassResult(answers, run.wall_s), sent), tally)


def _how_long(arm: AgentArm, requests: Sequence[AgentRequest], pace: float) -> str:
    """How a pass goes, how long it takes at least, and why the page may show nothing of it."""
    minutes = pace * (requests[-1].at - requests[0].at) / 60
    said = f"side by side, at least {minutes:.0f} min"
    return said if arm.graph else f"{said}; no graph, so the page is empty"


def _run_arms(
    room: Room,
    requests: Sequence[AgentRequest],
    known: dict[Digest, SourceLayer],
    shown: DemoProgress,
    page: LivePage | None,
) -> tuple[tuple[ArmResult, ...], float]:
    done: list[ArmResult] = []
    pace: float | None = None
    for arm in ENGINE_ARMS:
        shown.starting(arm.name)
        plan = replace(room.plan(arm, arm.name.replace(" ", "_")), max_num_seqs=RUNNING)
        if page is not None:
            page.begin_anew()
            plan = replace(plan, settings=(*plan.settings, (ENDPOINT, page.endpoint)))
        with watched(plan, known) as (server, ledger):
            if pace is None:
                shown.passing(arm.name, "how fast is this machine?", len(requests))
                first = Sender([server.url], requests, arm.telling, shown.answered).one_by_one()
                pace = pace_of(first.result.wall_s, requests)
                server.reset_prefix_cache()
                ledger.take()
            shown.passing(arm.name, _how_long(arm, requests, pace), len(requests))
            sender = Sender([server.url], requests, arm.telling, shown.answered, pace)
            passed = sender.side_by_side()
            price = _price(server, page) if arm.graph else None
            done.append(ArmResult(arm.name, passed, ledger.take(), price))
    assert pace is not None
    return tuple(done), pace


def _price(server: Server, page: LivePage | None) -> float | None:
    if page is not None:
        return price_in(page.status())
    status = httpx.get(f"{server.sidecar_url()}/status", timeout=10.0, trust_env=False)
    return price_in(status.json())
