"""Fleets of recorded agents as traces for the lab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from kvgraph.advisor.replay.fleet_traffic import Signals, lay_over_users, trace_lines, write_trace
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorded_sessions import Session
from kvgraph.advisor.replay.trace import Trace
from kvgraph.graph.types import SourceLayer

BLOCK: Final = 512
SEED: Final = 1
TENANTS: Final = 4


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
