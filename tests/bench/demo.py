"""The demo: one agent workload against a real vLLM, stock and then with the graph."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..graph.types import SourceLayer
from .errors import ServerError
from .figures import Figures
from .ledger import Ledger, Tally, layers_by_digest
from .model import ensure_model, vocabulary_size
from .passes import OnAnswer, PassResult, agreement, all_at_once, one_at_a_time
from .progress import DemoProgress
from .server import Server, ServerPlan
from .workload import Workload, build_workload

POOL_BLOCKS: Final = 288
"""KV blocks that either arm gets: room for the live sessions, not for everything that passes."""

ADVISED: Final = "engine linked to the sidecar"
"""What the engine logs once its link to the sidecar stands."""

_Pass = Callable[[str, Workload, OnAnswer], Coroutine[Any, Any, PassResult]]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one arm did in both passes, and what its cache lost meanwhile."""

    arm: str
    sequential: PassResult
    concurrent: PassResult
    sequential_tally: Tally
    concurrent_tally: Tally

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens of the run that came out of the prefix cache."""
        passes = (self.sequential, self.concurrent)
        return sum(p.cached_tokens for p in passes) / sum(p.prompt_tokens for p in passes)

    @property
    def evicted(self) -> dict[SourceLayer, int]:
        """Blocks evicted in both passes, by layer."""
        tallies = (self.sequential_tally, self.concurrent_tally)
        return {layer: sum(t.evicted[layer] for t in tallies) for layer in SourceLayer}

    @property
    def protected_lost(self) -> int:
        """Evictions of protected blocks in both passes."""
        return self.sequential_tally.protected_lost + self.concurrent_tally.protected_lost


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both arms, and where logs, picture and figures lie."""

    model: str
    out: Path
    requests: int
    stock: ArmResult
    graph: ArmResult

    @property
    def arms(self) -> tuple[ArmResult, ArmResult]:
        """Stock first."""
        return self.stock, self.graph

    @property
    def texts_identical(self) -> bool:
        """Whether the two arms answered every request of the sequential pass alike."""
        return self.stock.sequential.texts == self.graph.sequential.texts

    @property
    def arms_agree(self) -> float:
        """Share of equal answers between the arms' concurrent passes."""
        return agreement(self.stock.concurrent, self.graph.concurrent)

    @property
    def stock_agrees_with_itself(self) -> float:
        """Share of equal answers between stock's own two passes: what batching alone moves."""
        return agreement(self.stock.concurrent, self.stock.sequential)

    def figures(self) -> Figures:
        """The figures of ``kvgraph bench demo``."""
        stock, graph = self.stock, self.graph
        figures = Figures("demo")
        gains = (
            graph.sequential.cached_tokens / graph.sequential.prompt_tokens
            - stock.sequential.cached_tokens / stock.sequential.prompt_tokens,
            graph.concurrent.cached_tokens / graph.concurrent.prompt_tokens
            - stock.concurrent.cached_tokens / stock.concurrent.prompt_tokens,
        )
        gain = 100 * (graph.hit_rate - stock.hit_rate)
        figures.add("hit_gain_points", gain, "points", "≥ 10")
        figures.add("hit_gain_points_sequential", 100 * gains[0], "points")
        figures.add("hit_gain_points_concurrent", 100 * gains[1], "points")
        figures.add("protected_lost", graph.protected_lost, "blocks", "0")
        figures.add("stock_protected_lost", stock.protected_lost, "blocks", "> 0")
        figures.add("texts_identical", self.texts_identical, "bool", "yes")
        figures.add("concurrent_agreement", 100 * self.arms_agree, "%")
        figures.add("stock_self_agreement", 100 * self.stock_agrees_with_itself, "%")
        figures.add("ttft_p50_ratio", self._ttft_ratio(50), "graph / stock")
        figures.add("ttft_p95_ratio", self._ttft_ratio(95), "graph / stock")
        return figures

    def _ttft_ratio(self, percentile: float) -> float:
        stock, graph = (quantile(arm.concurrent.ttft_ms, percentile) for arm in self.arms)
        return graph / stock


def quantile(samples: list[float], percentile: float) -> float:
    """The ``percentile``-th percentile, interpolated."""
    import numpy as np

    return float(np.percentile(samples, percentile))


def run_demo(model: str | None, out: Path, progress: bool = True) -> DemoResult:
    """Run both arms on the same requests, one after the other.

    Args:
        model: Anything that vLLM loads; None: a small random Llama, written on first use.
        out: Where the servers' logs are kept.
        progress: Whether to show what is going on, on stderr.

    Raises:
        ServerError: vLLM did not start, or the graph's arm ran without its graph.
        CompletionError: A request was refused.
        LedgerError: vLLM's KV events could not be read.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    workload = build_workload(vocabulary_size(name))
    requests = len(workload.in_order())
    with DemoProgress(requests, shown=progress) as shown:
        stock = _run_arm(name, workload, out, False, shown)
        graph = _run_arm(name, workload, out, True, shown)
    return DemoResult(name, out, requests, stock, graph)


def _run_arm(
    model: str, workload: Workload, out: Path, graph: bool, shown: DemoProgress
) -> ArmResult:
    with tempfile.TemporaryDirectory(prefix="kvgraph-demo-") as sockets:
        events = f"ipc://{sockets}/events.sock"
        plan = ServerPlan(model, graph, out, blocks=POOL_BLOCKS, events_endpoint=events)
        shown.starting(plan.arm)
        with Ledger(events, layers_by_digest(workload)) as ledger, Server(plan) as server:
            if graph:
                check_advised(server)
            sequential, first = _run_pass(one_at_a_time, server, workload, ledger, shown)
            server.reset_prefix_cache()
            ledger.take()
            concurrent, second = _run_pass(all_at_once, server, workload, ledger, shown)
    return ArmResult(plan.arm, sequential, concurrent, first, second)


def _run_pass(
    how: _Pass, server: Server, workload: Workload, ledger: Ledger, shown: DemoProgress
) -> tuple[PassResult, Tally]:
    shown.passing(server.plan.arm, "one at a time" if how is one_at_a_time else "all at once")
    result = asyncio.run(how(server.url, workload, shown.answered))
    return result, ledger.take()


def check_advised(server: Server) -> None:
    """A graph arm that is stock in truth would make the comparison a lie."""
    if not server.logged(ADVISED, within_s=15.0):
        raise ServerError(
            "the engine did not link to a kvgraph sidecar; the end of its log:\n"
            + server.log_tail()
        )
