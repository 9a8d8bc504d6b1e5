"""``kvgraph bench recall``: what comes back, how fast, and that nobody else meets it."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvgraph.hooks.recall.cover import SpliceLimits
from rich.console import Console

from ..figures import Figures
from ..paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape, base_config
from ..paper.paper_model import WrongReadError
from ..serving.model import TINY, ensure_model
from .approximate import keep_calibration, recalling
from .recall_stage import LENGTHS, SPEED_MODELS, start

REQUESTS: Final = 10_000
_TENANTS: Final = 12  # salts at any time; each is replaced now and then; chosen
_DOCUMENTS: Final = 24  # that all tenants' prompts are made of; chosen
_SESSIONS: Final = 8  # names that several tenants use; chosen
_AT_ONCE: Final = 6


class _Owner(NamedTuple):
    """Whose text a block holds: all sessions' with a salt, or one's where it is approximate."""

    salt: str | None
    session: str | None = None


@dataclass
class Crossed:
    """What was seen: ``cross_hits`` of requests that read what is not theirs, or what is
    approximate unasked; requests with ``spliced`` tokens; and tokens of opted-in prompts: all,
    found exactly, recovered by a splice.
    """

    requests: int = 0
    cross_hits: int = 0
    spliced: int = 0
    prompt: int = 0
    exact: int = 0
    recovered: int = 0
    owners: dict[bytes, _Owner] = field(default_factory=dict)  # whose text a block holds


def run_crossed(requests: int, seed: int) -> Crossed:
    """Play random requests: salts, opted in or not, shared documents in any order, aborts."""
    with tempfile.TemporaryDirectory() as scratch:
        config = base_config(ensure_model(TINY))
        os.environ["AITHER_KVCACHE_RECALL_SHARED"] = "1"  # those without a salt are one caller
        keep_calibration(
            config.model_config, Path(scratch), SpliceLimits(margin=2, most_generations=4)
        )
        return _Play(config, random.Random(seed)).run(requests)


class _Play:
    def __init__(self, config: Any, rng: random.Random) -> None:
        self._rng, self.seen = rng, Crossed()
        self._engine = recalling(PaperEngine(config, Shape(blocks=129, warm=512), rng))
        self._documents = [_words(rng, rng.randrange(40, 90)) for _ in range(_DOCUMENTS)]
        self._salts: list[str | None] = [None, *(f"{rng.random()}" for _ in range(_TENANTS))]
        self._sessions: dict[str, str | None] = {}
        self._watch()

    def run(self, requests: int) -> Crossed:
        while self.seen.requests < requests:
            running = [self._ask() for _ in range(self._rng.randrange(1, _AT_ONCE))]
            if self._rng.random() < 0.1:
                self._engine.step()
                self._engine.abort(self._rng.choice(running))
            try:
                self._engine.settle()
            except WrongReadError:
                self.seen.cross_hits += 1
                break  # what stands in memory is no longer known
        self._engine.close()
        return self.seen

    def _ask(self) -> Any:
        rng, fields = self._rng, dict[str, Any]()
        salt = rng.choice(self._salts)
        if rng.random() < 0.02:
            self._salts[rng.randrange(1, len(self._salts))] = f"{rng.random()}"
        if rng.random() < 0.6:
            fields["kv_transfer_params"] = {"kvgraph": {"recall": True}}
            if rng.random() < 0.5:
                fields["kv_transfer_params"]["kvgraph"]["session"] = str(rng.randrange(_SESSIONS))
        parts = [rng.choice(self._documents) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3:
            parts[0] = parts[0][rng.randrange(20) :]
        if rng.random() < 0.2:
            parts.insert(rng.randrange(len(parts)), _words(rng, rng.randrange(30)))
        tokens = [*(token for part in parts for token in part), *_words(rng, 5)]
        self.seen.requests += 1
        request = self._engine.ask(tokens, rng.randrange(1, 30), cache_salt=salt, **fields)
        self._sessions[request.request_id] = (
            fields.get("kv_transfer_params", {}).get("kvgraph", {}).get("session")
        )
        return request

    def _watch(self) -> None:
        """See what each request that ends was given, and whose copies each splice reads."""
        side, seen = self._engine.side, self.seen
        finished, begin = side.recall.request_finished, side.bridge.loader.begin

        def request_finished(request: Any, block_ids: Any) -> Any:
            self._note_owners(request.request_id)
            told = finished(request, block_ids)
            if told is not None:
                usage = told["kvgraph"]["recall"]
                seen.prompt += sum(usage.values())
                seen.exact += usage["exact"]
                seen.recovered += usage["spliced"]
                seen.spliced += usage["spliced"] > 0
            return told

        def watched_begin(request_id: str, hashes: Any, blocks: Any, *splice: Any) -> None:
            salt = self._engine.scheduler.requests[request_id].cache_salt
            allowed = (_Owner(salt), _Owner(salt, self._sessions[request_id]))
            for copy in splice[0].copies if splice else ():
                seen.cross_hits += seen.owners[copy.block_hash] not in allowed
            begin(request_id, hashes, blocks, *splice)

        side.recall.request_finished, side.bridge.loader.begin = request_finished, watched_begin
        self._engine.rewire()

    def _note_owners(self, request_id: str) -> None:
        """Blocks from a request's first approximate one on are its session's alone."""
        request = self._engine.scheduler.requests[request_id]
        exact = self._engine.side.recall.exact.get(request_id)
        session = self._sessions[request_id]
        for at, block_hash in enumerate(request.block_hashes):
            mine = exact is not None and at >= exact // BLOCK_SIZE
            owner = _Owner(request.cache_salt, session if mine else None)
            self.seen.owners.setdefault(block_hash, owner)


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 190) for _ in range(count)]


PARTS: Final = ("all", "mixed", "exact", "speed", "needle", "chats")
ROUNDS: Final = 9  # of each length; the medians are reported
PLAIN: Final = 120  # requests of the real engine, half of them plain
TEXTS: Final = 60


def run(progress: bool, part: str = "all", quick: bool = False, seed: int = 1) -> Figures:
    say = Console(stderr=True, quiet=not progress).print
    figures = Figures("recall")
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        scratch = Path(folder)
        if part in ("all", "mixed"):
            say("mixed requests of several tenants, above vLLM's scheduler")
            _add_crossed(figures, REQUESTS // 20 if quick else REQUESTS, seed)
        if part in ("all", "exact"):
            say("plain requests beside those with recall, on a real engine, and on stock")
            _add_exact(figures, scratch, PLAIN // 4 if quick else PLAIN)
        if part in ("all", "speed"):
            say("saved, loaded and computed again, through requests of a real engine")
            _add_speed(figures, scratch, 3 if quick else ROUNDS)
        if part in ("all", "needle"):
            from .needle import add_needles

            add_needles(figures, scratch, TEXTS // 10 if quick else TEXTS, seed, say)
        if part in ("all", "chats"):
            from ..memory.memory_bench import SESSIONS, add_chats

            add_chats(figures, scratch, SESSIONS // 5 if quick else SESSIONS, seed, say)
    return figures


def _add_crossed(figures: Figures, requests: int, seed: int) -> None:
    seen = run_crossed(requests, seed)
    figures.add("mixed_requests", seen.requests, "requests")
    figures.add("cross_hits", seen.cross_hits, "requests", "0")
    figures.add("mixed_spliced_requests", seen.spliced, "requests")
    figures.add("mixed_exact_share", seen.exact / max(1, seen.prompt), "of opted-in tokens")
    figures.add("mixed_recovered_share", seen.recovered / max(1, seen.prompt), "of opted-in tokens")


def _add_exact(figures: Figures, scratch: Path, requests: int) -> None:
    ours, stock = (start("exact", recall, scratch, count=requests) for recall in (True, False))
    plain = [(mine, theirs) for mine, theirs in zip(ours, stock, strict=True) if not mine["asks"]]
    asked = [row for row in ours if row["asks"]]
    same = sum(mine["tokens"] == theirs["tokens"] for mine, theirs in plain)
    figures.add("exact_identical", same / len(plain), "of plain answers", "1")
    figures.add("plain_requests", len(plain), "requests")
    recovered = sum(row.get("spliced", 0) for row in asked)
    prompt = sum(row["prompt"] for row in asked)
    figures.add("tokens_recovered", recovered, "tokens")
    figures.add("tokens_recovered_share", recovered / prompt, "of opted-in tokens")


def _add_speed(figures: Figures, scratch: Path, rounds: int) -> None:
    for part in SPEED_MODELS:
        rows: list[dict[str, Any]] = start(part, True, scratch, count=rounds)
        suffix = part.removeprefix("speed")
        for length in LENGTHS:
            name, of = f"{length}{suffix}", [row for row in rows if row["tokens"] == length]
            for how in ("recalled", "resident", "computed"):
                figures.add(f"{how}_ms_{name}", [1e3 * row[f"{how}_s"] for row in of], "ms")
            recalled = [row for row in of if row["spliced"] == length]
            ratios = [row["computed_s"] / row["recalled_s"] for row in recalled]
            if ratios:
                target = "≥ 20" if length == 640 else ""
                figures.add(f"splice_vs_prefill_{name}", ratios, "×", target)
