"""Leases: blocks that are kept for a while, as bounded shares of each engine's pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..tables.tables import Tables
from ..types import NO_ROW, Rows, Tier

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LeaseBounds:
    """How much may be leased, and for how long; all chosen.

    Attributes:
        pool_share: Of a pool, by all leases in it; no more than protection may keep there.
        tenant_share: Of a pool, by those of one named tenant.
        longest_s: Of a lease, and of an order to prefetch.
    """

    pool_share: float = 0.25
    tenant_share: float = 0.125
    longest_s: float = 900.0


def leasable(
    tables: Tables, bounds: LeaseBounds, rows: Rows, now: float, arriving: int | None = None
) -> Rows:
    """The first of ``rows``, all of one tenant, that may be leased together.

    Blocks that are in no pool are left out, unless they are about to be in that of the engine
    ``arriving``. In each pool that holds some of them, the leases of
    others count, and so do those of the same tenant.
    """
    blocks = tables.blocks
    if arriving is None:
        rows = rows[(blocks.tiers[:, rows] & int(Tier.HOT)).any(axis=0)]
    if not len(rows):
        return rows
    tenant = int(blocks.tenant[rows[0]])
    others = _leased(tables, now)
    others[rows] = False
    fitting = np.ones(len(rows), dtype=np.bool_)
    for engine, pool in tables.pool_blocks.items():
        here = (blocks.tiers[engine, rows] & int(Tier.HOT)) != 0
        here |= engine == arriving
        fitting &= ~here | (np.cumsum(here) <= _room(tables, bounds, engine, pool, others, tenant))
    leased: Rows = rows[fitting]
    return leased


def _leased(tables: Tables, now: float) -> Mask:
    """bool ``[blocks.size]``: those with a lease."""
    blocks = tables.blocks
    return np.asarray(blocks.pinned_until[: blocks.size] > now)


def _room(
    tables: Tables,
    bounds: LeaseBounds,
    engine: int,
    pool: int,
    leased: Mask,
    tenant: int,
) -> int:
    """Blocks that a tenant may still lease in an engine's pool."""
    blocks = tables.blocks
    here = leased & ((blocks.tiers[engine, : blocks.size] & int(Tier.HOT)) != 0)
    own = here & (blocks.tenant[: blocks.size] == tenant)
    most = min(bounds.pool_share, tables.kept_share(engine))  # leases have a price, too
    each = most if tables.protected_share is not None else most / 2  # as ``limited_by`` has it
    share = min(bounds.tenant_share, each) if tenant != NO_ROW else most
    in_all = int(most * pool) - int(np.count_nonzero(here))
    return min(in_all, int(share * pool) - int(np.count_nonzero(own)))
