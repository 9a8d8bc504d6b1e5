"""The figures of ``kvgraph bench meaning`` that real servers give."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ...figures import Figures
from ...serving.cache_ledger import Ledger
from ...serving.vllm_server import Server, ServerPlan, check_advised
from .chat_model import QUICK_MODEL, SLOW_MODEL, Words, write_chat_model
from .chat_server import RULING, chat_plan, client_of
from .dead_branches import dead_branches
from .first_turns import first_turns
from .survival import busy_cores, survival

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked.

    Attributes:
        turns: Of the long chat.
        firsts: First turns behind ``kvgraph precache``.
        rounds: Compacted chats.
    """

    turns: int
    firsts: int
    rounds: int


FULL: Final = Scale(turns=200, firsts=7, rounds=4)
QUICK: Final = Scale(turns=30, firsts=2, rounds=1)


def add_engine_figures(figures: Figures, scale: Scale, seed: int, say: Say) -> None:
    """Measure on stock vLLM, on the graph as it comes with layers, and where its policy ranks from
    the start."""
    with tempfile.TemporaryDirectory(prefix="kvg-", dir="/tmp") as scratch:
        bench = _Bench(Path(scratch), figures, scale, seed, say)
        bench.long_chat("stock", graph=False)
        bench.long_chat("graph", graph=True)
        bench.busy_chat()
        bench.branches()
        stock = bench.first_turns("stock_first", graph=False)
        graph = bench.first_turns("graph_first", graph=True)
    figures.add("precache_ttft_ratio", graph / stock, "of stock's", "≤ 0.3")


class _Bench:
    """Starts one server after the other, and adds what it finds."""

    def __init__(
        self, directory: Path, figures: Figures, scale: Scale, seed: int, say: Say
    ) -> None:
        self._directory, self._figures, self._scale = directory, figures, scale
        self._seed, self._say = seed, say
        self._model = write_chat_model(directory / "model", QUICK_MODEL)

    def long_chat(self, name: str, graph: bool) -> None:
        """The long chat, and compacted chats on stock."""
        prefix = "" if graph else "stock_"
        with self._server(chat_plan(self._model, graph, self._directory, name)) as (server, ledger):
            self._add_survival(f"{prefix}identity_survival", self._words(), server)
            if not graph:
                self._add_branches("stock_dead_branch_first", server, ledger)

    def first_turns(self, name: str, graph: bool) -> float:
        """First turns of a model that computes their prefix for long: their seconds, the median."""
        model = self._directory / "slow"
        if not model.is_dir():
            write_chat_model(model, SLOW_MODEL)
        with self._server(chat_plan(model, graph, self._directory, name)) as (server, _):
            client = client_of(server)
            found = first_turns(server, client, self._words(), self._directory, self._scale.firsts)
        self._say(f"{name}: first turns {[round(each, 3) for each in found]} s")
        figure = "first_turn" if graph else "stock_first_turn"
        self._figures.add(figure, [1000 * each for each in found], "ms", "")
        return float(np.median(found))

    def busy_chat(self) -> None:
        """The long chat while others want both cores."""
        plan = chat_plan(self._model, True, self._directory, "busy")
        with self._server(plan) as (server, _), busy_cores(2):
            self._add_survival("identity_survival_busy", self._words(), server)

    def branches(self) -> None:
        """Compacted chats where the policy ranks."""
        plan = chat_plan(self._model, True, self._directory, "ruling", RULING)
        with self._server(plan) as (server, ledger):
            self._add_branches("dead_branch_first", server, ledger)

    def _add_survival(self, name: str, words: Words, server: Server) -> None:
        found = survival(client_of(server), words, self._scale.turns)
        self._say(f"{name}: {found}")
        target = "< 1" if name.startswith("stock") else "1"
        self._figures.add(name, found.turns, "of turns", target)
        self._figures.add(f"{name}_behind_others", found.bursts, "of turns", target)

    def _add_branches(self, name: str, server: Server, ledger: Ledger) -> None:
        found = dead_branches(server, client_of(server), ledger, self._words(), self._scale.rounds)
        self._say(f"{name}: {found}")
        target = "" if name.startswith("stock") else "≥ 0.95"
        self._figures.add(name, found.dead_first, "of blocks of chats", target)

    def _words(self) -> Words:
        return Words(self._model, self._seed)

    @contextlib.contextmanager
    def _server(self, plan: ServerPlan) -> Iterator[tuple[Server, Ledger]]:
        """A running server, and what its KV events say."""
        self._say(f"{plan.arm}: starting vLLM")
        events = f"ipc://{self._directory}/{plan.arm}.sock"
        with Ledger(events, {}) as ledger, Server(replace(plan, events_endpoint=events)) as server:
            if plan.graph:
                check_advised(server)
            yield server, ledger
