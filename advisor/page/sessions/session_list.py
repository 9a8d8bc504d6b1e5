"""Who is here: sessions, and what the engines hold of them."""

from __future__ import annotations

import numpy as np

from ....dashboards.answers.session_views import Sessions, SessionView
from ....graph.queries.held_chains import held_chains, shared_chains
from ....graph.tables.tables import Tables
from ....graph.types import NEVER, NO_ROW, STATE_NAMES, Tier
from ...times.unix_time import Unix


def sessions_view(tables: Tables, limit: int, search: str, now: float, unix: Unix) -> Sessions:
    """Those whose name or tenant contains ``search``, the last heard of first."""
    sessions = tables.sessions
    newest = np.argsort(-sessions.last_seen[: sessions.size], kind="stable").tolist()
    rows = [row for row in newest if not search or _matches(tables, row, search)][:limit]
    states = np.bincount(sessions.state[: sessions.size], minlength=len(STATE_NAMES)).tolist()
    return Sessions(
        at=unix(now),
        sessions=views_of(tables, rows, now),
        known=len(sessions),
        states=dict(zip(STATE_NAMES, states, strict=True)),
    )


def _matches(tables: Tables, row: int, search: str) -> bool:
    tenant = tables.tenants.name(int(tables.sessions.tenant[row])) or ""
    return search.lower() in f"{tables.sessions.names[row]}\n{tenant}".lower()


def views_of(tables: Tables, rows: list[int], now: float) -> list[SessionView]:
    """The sessions of some rows, in their order."""
    sessions, blocks = tables.sessions, tables.blocks
    returns = sessions.return_probability()
    live = blocks.live_rows()
    owner, tiers = blocks.session[live], np.bitwise_or.reduce(blocks.tiers[:, live], axis=0)
    size = sessions.size
    held = {
        tier: np.bincount(owner[(owner != NO_ROW) & ((tiers & int(tier)) != 0)], minlength=size)
        for tier in (Tier.HOT, Tier.WARM, Tier.COLD)
    }
    blocks_of = np.bincount(owner[owner != NO_ROW], minlength=size)
    names = {column: name for name, column in tables.engines.items()}
    found = []
    for row, chain in zip(rows, _chains(tables, rows), strict=True):
        due = float(sessions.expected_return[row])
        found.append(
            SessionView(
                session=sessions.names[row],
                tenant=tables.tenants.name(int(sessions.tenant[row])),
                state=STATE_NAMES[sessions.state[row]],
                inferred=bool(sessions.inferred[row]),
                turns=int(sessions.turns[row]),
                tokens=int(sessions.tokens[row]),
                idle_s=round(now - float(sessions.last_seen[row]), 3),
                mean_pause_s=round(float(sessions.gap[row]), 3),
                waits_for=sessions.tools.name(int(sessions.tool[row])),
                expected_return_in_s=round(due - now, 3) if due > NEVER else None,
                return_probability=round(float(returns[row]), 4),
                pool=int(held[Tier.HOT][row]),
                warm=int(held[Tier.WARM][row]),
                cold=int(held[Tier.COLD][row]),
                blocks=int(blocks_of[row]),
                engine=names.get(int(sessions.engine[row])),
                **chain,
            )
        )
    return found


def _chains(tables: Tables, rows: list[int]) -> list[dict[str, int]]:
    """What each session's engine still has of its last request; the fields of its view."""
    sessions, chosen = tables.sessions, np.array(rows, dtype=np.int64)
    tips = sessions.tip[chosen]
    found = (*held_chains(tables, tips, sessions.engine[chosen]), shared_chains(tables, tips))
    columns = (column.tolist() for column in found)
    names = ("chain", "chain_pool", "chain_copied", "chain_shared")
    return [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]
