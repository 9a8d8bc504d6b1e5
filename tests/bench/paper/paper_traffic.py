"""Random traffic and faults over vLLM's own schedulers, with a memory that remembers.

Requests come, grow, are aborted and preempted; salts and adapters share prompts; drafts are right
or wrong; copies move in halves and are answered late, or fail; advice is random; weights change,
with or without force; anything of ours breaks at a random moment; engines restart with the disk
that they left, and with adapters that were trained on meanwhile under their old names. After each
episode nothing may hang, be held, or be left in any book, and at no moment may a position be read
that holds anything but its own.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.tiers.jobs import Job

from .paper_engine import BLOCK_SIZE, PaperEngine, Shape
from .paper_model import LANES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

STEPS: Final = 600  # of an episode
_BROKEN: Final = 0.4  # share of episodes in which something of ours breaks
_TURNS: Final = 0.03  # share of steps at which traffic stops, or begins again
_MOST_REQUESTS: Final = 8
_MOST_TOKENS: Final = 320
_HYBRID: Final = ((None,), (None, 40), (40, None), (None, 20, 70), (None, 0), (0, None))
# What may break: anything that vLLM's calls reach, and what they in turn rely on.
_PLACES: Final = (
    "observer.request_queued", "_looked_up", "_scheduled", "_finished", "step", "_catch_up",
    "tap.take", "_steps.step", "_steps.finish", "observer.blocks_changed",
    "observer.request_scheduled", "observer.request_finished", "observer.requests_preempted",
    "arranger.step",
    "bridge.get_num_new_matched_tokens",
    "bridge.spill", "bridge.fetch", "bridge.step_ended", "bridge.ledger.clear",
    "bridge.ledger.directory.drop_all", "bridge.loader.foresee", "bridge.loader.load_victims.look",
    "bridge.loader.load_victims.save", "bridge.spiller.freed",
)  # fmt: skip


@dataclass
class Story:
    """What happened in an episode, or in many."""

    positions_read: int = 0  # positions whose content was compared with what should stand there
    counts: Counter[str] = field(default_factory=Counter)  # everything else, by name

    def __iadd__(self, other: Story) -> Story:
        self.positions_read += other.positions_read
        self.counts += other.counts
        return self


def play(
    base: VllmConfig,
    seed: int,
    seconds: float,
    steps: int = STEPS,
    say: Callable[[str], None] = lambda text: None,
    positions: int | None = None,
    shapes: Callable[[random.Random], Shape] | None = None,
) -> Story:
    """Episodes until ``seconds`` are over; ``say`` is told how far it is."""
    whole, number, until = Story(), 0, time.monotonic() + seconds
    while (time.monotonic() < until or not number) and not (
        positions is not None and whole.positions_read >= positions
    ):
        whole += episode(base, seed, number, steps, shapes)
        number += 1
        say(f"{number} episodes, {whole.positions_read:,} positions read")
    whole.counts["episodes"] = number
    return whole


def episode(
    base: VllmConfig,
    seed: int,
    number: int,
    steps: int = STEPS,
    shapes: Callable[[random.Random], Shape] | None = None,
) -> Story:
    """One engine's life, and that of those that find its disk; see ``play``."""
    rng = random.Random(f"{seed}/{number}")
    shape = (shapes or random_shape)(rng)
    story, disks = Story(), None
    try:
        for training in range(2 if shape.cold else 1):
            life = _Life(base, shape, rng, disks, training)
            story += life.live(steps)
            disks = life.disks_left()
    except Exception as error:
        raise AssertionError(f"seed {seed}, episode {number}, {shape}: {error}") from error
    return story


def random_shape(rng: random.Random) -> Shape:
    """An engine of any kind that has tiers, or of one that has none."""
    warm = rng.choice((None, 8, 24, 64, 64))
    windows = rng.choice(_HYBRID) if warm is None else (None,)
    return Shape(
        blocks=rng.randrange(30, 60) * len(windows),
        asynchronous=rng.random() < 0.5,
        warm=warm,
        cold=rng.choice((0, 24, 96)) if warm is not None else 0,
        workers=rng.choice((1, 1, 2)),
        drafts=rng.choice((0, 0, 3)) if 0 not in windows else 0,
        windows=windows,
    )


class _Life:
    def __init__(
        self,
        base: VllmConfig,
        shape: Shape,
        rng: random.Random,
        disks: Any = None,
        training: int = 0,
    ) -> None:
        self.rng = rng
        self.engine = PaperEngine(base, shape, rng, disks, training)
        self.counts: Counter[str] = Counter()
        self._open: list[tuple[Request, int]] = []  # and how many tokens it is to say
        self._ended: list[list[int]] = []  # what may be asked again, longer
        self._seen: list[int] = []  # keys
        self._quiet = False  # nobody comes: what is wanted can be brought back
        self._failing = rng.choice((0.0, 0.02, 0.1))
        self._trained = not shape.cold or rng.random() < 0.5  # a disk outlives none but old weights
        self.counts["records found"] += sum(map(len, disks or ()))
        for worker in self.engine.workers:
            worker.failing = self._fails
            worker.gives_up = self._gives_up
        if self.engine.has_tiers:
            costs = self.engine.side.bridge.ledger.costs
            costs.worth_loading = lambda *_: rng.random() < 0.9

    def live(self, steps: int) -> Story:
        engine = self.engine
        broken_at = self.rng.randrange(steps) if self.rng.random() < _BROKEN else None
        try:
            for at in range(steps):
                if at == broken_at:
                    self._break()
                self._act()
                self._step()
            self._end()
        finally:
            engine.close()
        self.counts["engines"] += 1
        return Story(engine.model.positions_read, self.counts)

    def disks_left(self) -> list[dict[bytes, Any]] | None:
        """What the next engine finds; nothing once weights may have changed."""
        workers = self.engine.workers
        return None if any(w.disowned for w in workers) else [w.disk for w in workers]

    # What happens -------------------------------------------------------------------------------

    def _act(self) -> None:
        roll = self.rng.random()
        self._quiet ^= self.rng.random() < _TURNS
        actions: tuple[tuple[float, Callable[[], None]], ...] = (
            (0.22, self._ask), (0.24, self._abort), (0.32, self._advise), (0.335, self._reset),
        )  # fmt: skip
        for bound, act in actions:
            if roll < bound:
                act()
                return

    def _ask(self) -> None:
        rng, engine = self.rng, self.engine
        if self._quiet or len(self._open) >= _MOST_REQUESTS:
            return
        fields: dict[str, Any] = {"cache_salt": rng.choice((None, None, None, "a", "b"))}
        if rng.random() < 0.1:
            fields["lora_request"] = _adapter(rng.choice((1, 2)))
            self.counts["adapters' requests"] += 1
        output = rng.randrange(1, 40)
        request = engine.ask(self._prompt(), output, **fields)
        self._open.append((request, output))
        self._seen += [key_of(block_hash) for block_hash in request.block_hashes]
        del self._seen[:-300]
        self.counts["requests"] += 1

    def _prompt(self) -> list[int]:
        rng = self.rng
        start = rng.choice(self._ended) if self._ended and rng.random() < 0.4 else []
        parts = [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
        grown = [*start, *(part for part in parts for _ in range(BLOCK_SIZE))]
        return [*grown[:_MOST_TOKENS], *[9] * rng.randrange(1, 5)]

    def _abort(self) -> None:
        if self._open:
            request, _ = self._open.pop(self.rng.randrange(len(self._open)))
            self.engine.abort(request)
            self.counts["aborts"] += 1

    def _advise(self) -> None:
        side = self.engine.side
        if side is None:
            return

        def some(most: int = 300) -> Any:
            count = self.rng.randrange(len(self._seen) + 1)
            return np.array(self.rng.sample(self._seen, count)[:most], dtype=np.uint64)

        columns = [some(), some(20), some(), some()]
        side.client.hold_ranking(EvictionRanking(1, time.monotonic() + 1e6, *columns))
        side.client.hold_wanted(self._wanted() if self.engine.has_tiers else some(40))

    def _wanted(self) -> Any:
        """What a sidecar suggests to bring back: blocks with copies, in any order."""
        hashes = self.engine.side.bridge.ledger.directory.warm_hashes()
        chosen = self.rng.sample(hashes, self.rng.randrange(len(hashes) + 1))
        return np.array([key_of(block_hash) for block_hash in chosen], dtype=np.uint64)

    def _reset(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        rng, scheduler = self.rng, self.engine.scheduler
        if not self._trained:
            return
        forced, paused = rng.random() < 0.6, rng.random() < 0.3
        if paused:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            for _ in range(rng.randrange(6)):
                self._step()
        done = self.engine.reset(reset_running_requests=forced, reset_connector=rng.random() < 0.5)
        if paused:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        self.counts["resets"] += done
        self.counts["forced resets"] += forced

    def _break(self) -> None:
        """From now on one thing of ours raises, once it is called."""
        lacking = [name for name in ("bridge", "_steps") if getattr(self.engine.side, name) is None]
        places = [place for place in _PLACES if place.partition(".")[0] not in lacking]
        owner, name = self.engine.side, self.rng.choice(places)
        while "." in name:
            part, _, name = name.partition(".")
            owner = getattr(owner, part)
        setattr(owner, name, _raise)
        self.engine.rewire()
        self.counts["faults"] += 1

    def _fails(self, job: Job) -> list[int]:
        return [at for at in range(len(job.copies)) if self.rng.random() < self._failing]

    def _gives_up(self, job: Job) -> bool:
        return self.rng.random() < self._failing

    # Steps --------------------------------------------------------------------------------------

    def _step(self) -> None:
        engine, rng = self.engine, self.rng
        engine.step()
        if rng.random() < 0.5:
            engine.compute(1)
        for worker in engine.workers:
            for _ in range(rng.randrange(5)):
                worker.advance(rng.randrange(LANES))
        for request, output in [each for each in self._open if each[0].is_finished()]:
            self._open.remove((request, output))
            self._check_answer(request, output)

    def _check_answer(self, request: Request, output: int) -> None:
        answer = self.engine.outputs.pop(request.request_id)
        assert len(answer) == output, f"{request.request_id} said {len(answer)} of {output} tokens"
        self._ended.append([*(request.prompt_token_ids or ()), *answer])
        del self._ended[:-20]
        self.counts["preemptions"] += request.num_preemptions
        self.counts["answers"] += 1

    def _end(self) -> None:
        """Everybody is served, and nothing is left."""
        engine = self.engine
        engine.settle()
        self._step()
        assert not self._open, "requests were lost"
        assert engine.is_whole(), "blocks are lost, or held"
        if engine.has_tiers:
            self._check_books()

    def _check_books(self) -> None:
        side, connector = self.engine.side, self.engine.connector
        assert not connector.has_pending_push_work()
        if side is None:
            assert "cache_full_blocks" not in vars(self.engine.pool)
            self.counts["disabled"] += 1
            return
        ledger = side.bridge.ledger
        ledger.directory.check_integrity()
        assert not side.bridge.promises, "a promise is left"
        assert not side.bridge.promises.lend(), "blocks of a prefetch are left"
        counts = ledger.counts
        for name in ("loaded", "load_failed", "prefetched", "spilled", "demoted"):
            self.counts[name] += getattr(counts, name)


def _raise(*_: Any, **__: Any) -> None:
    raise RuntimeError("an injected fault")


def _adapter(number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, f"/nowhere/adapter-{number}")
