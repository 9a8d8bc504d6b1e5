"""The traces that `kvgraph bench policies` plays: fleets of recorded agents, and conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from kvgraph.advisor.replay.fleet_traffic import Signals, lay_over_users, trace_lines, write_trace
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorded_sessions import Session, read_sessions
from kvgraph.advisor.replay.trace import Trace
from kvgraph.graph.types import SourceLayer

from ..errors import InputError

BLOCK: Final = 512
SEED: Final = 1
TENANTS: Final = 4
FAST: Final = 14.0  # how much faster the fast fleet runs

_SHARED: Final = Path(__file__).parents[4] / "shared" / "traces"
SHARED: Final = _SHARED / "claude_code"
CONVERSATIONS: Final = _SHARED / "mooncake_conversation.jsonl"
SHIPPED: Final = Path(__file__).parents[1] / "sessions"


def default_sessions() -> Path:
    """The recorded sessions beside the repository, or else those that ship with it."""
    return SHARED if SHARED.is_dir() else SHIPPED


def sessions_in(directory: Path, progress: Callable[[int], None]) -> list[Session]:
    if not directory.exists():
        raise InputError(f"{directory}: there are no sessions; name some with --sessions")
    return read_sessions(directory, progress=progress)


def halves(sessions: Sequence[Session]) -> tuple[list[Session], list[Session]]:
    """Two disjoint halves, of which each is drawn at random; one session is in both."""
    order = sorted(sessions, key=lambda session: session.name)
    random.Random(SEED).shuffle(order)
    middle = len(order) // 2
    return order[:middle] or order, order[middle:]


def fleet(
    name: str,
    sessions: Sequence[Session],
    users: int,
    hours: float,
    signals: Signals,
    *,
    with_layers: bool = False,
) -> Trace:
    """A fleet as a trace, through the file format that `kvgraph traffic` writes."""
    requests = lay_over_users(sessions, users, hours * 3600, SEED)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "fleet.jsonl"
        write_trace(trace_lines(requests, BLOCK, signals, SEED, with_layers=with_layers), path)
        trace = load_trace(path)
    return replace(trace, name=name)


def of_tenants(trace: Trace, name: str, *, hostile: bool) -> Trace:
    """The same fleet, its sessions spread over ``TENANTS`` tenants."""
    assert trace.said is not None
    tenant = (trace.session % TENANTS).astype(np.int32)
    layers = tuple(
        ((SourceLayer.AXIOMS, 0, int(tokens)),) if hostile and owner == 0 else ()
        for owner, tokens in zip(tenant.tolist(), trace.input_tokens.tolist(), strict=True)
    )
    return replace(trace, name=name, said=replace(trace.said, tenant=tenant, layers=layers))


def faster(trace: Trace, factor: float) -> Trace:
    """The same requests, all times divided by ``factor``."""
    said = trace.said
    if said is not None:
        told, took = said.expected_return_s / factor, said.seconds / factor
        said = replace(said, expected_return_s=told, seconds=took)
    name = f"{trace.name}, {factor:g} × faster"
    return replace(trace, name=name, at=np.asarray(trace.at / factor), said=said)
