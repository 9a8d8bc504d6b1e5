"""What sidecars answer about sessions and engines: read, and refused where it is anything else."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

_MOST_TOKENS: Final = 1 << 40  # of a context; chosen: sums of them fit in 64 bits

_Blocks = Annotated[int, msgspec.Meta(ge=0)]


class AdvisedEngine(NamedTuple):
    """An engine, as its sidecar calls it; another sidecar's may have the same name."""

    sidecar: str
    name: str


class Held(NamedTuple):
    """What an engine holds of a session's last context there, in shares of its tokens.

    Attributes:
        pool: In its pool.
        copied: In its pool or in a tier below; at least ``pool``.
        shared: In a store that engines share.
        idle_s: Since its sidecar last heard of the session.
    """

    engine: AdvisedEngine
    tokens: int
    pool: float
    copied: float
    shared: float
    idle_s: float


def sessions_in(sidecar: str, content: bytes) -> dict[str, Held]:
    """What a sidecar's engines hold of sessions; of none that two of its tenants name.

    Raises:
        BAD_PAYLOAD: A sidecar answers otherwise.
    """
    found: dict[str, Held | None] = {}
    for each in _sessions.decode(content).sessions:
        found[each.session] = None if each.session in found else _held(sidecar, each)
    return {name: held for name, held in found.items() if held is not None}


def hashing_in(content: bytes) -> dict[str, str]:
    """By what engines tell blocks apart, in words, by their names.

    Raises:
        BAD_PAYLOAD: A sidecar answers otherwise.
    """
    return {each.id: each.hashing for each in _status.decode(content).engines}


class _Session(msgspec.Struct):
    session: str
    engine: str | None
    tokens: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
    chain: _Blocks
    chain_pool: _Blocks
    chain_copied: _Blocks
    idle_s: float
    chain_shared: _Blocks = 0


class _Sessions(msgspec.Struct):
    sessions: list[_Session]


class _Engine(msgspec.Struct):
    id: str
    hashing: str = ""


class _Status(msgspec.Struct):
    engines: list[_Engine]


_sessions: Final = msgspec.json.Decoder(_Sessions)
_status: Final = msgspec.json.Decoder(_Status)


def _held(sidecar: str, told: _Session) -> Held | None:
    if told.engine is None or told.chain == 0:
        return None
    engine = AdvisedEngine(sidecar, told.engine)
    told_of = told.chain_pool, told.chain_copied, told.chain_shared
    pool, copied, shared = (min(blocks / told.chain, 1.0) for blocks in told_of)
    return Held(engine, told.tokens, pool, max(pool, copied), shared, told.idle_s)
