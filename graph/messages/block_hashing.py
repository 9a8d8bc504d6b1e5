"""How engines hash blocks: those that do so differently find nothing of each other's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from .events import EngineHello

REMEDY: Final = (
    "Start them with one --block-size, one --prefix-caching-hash-algo and one PYTHONHASHSEED "
    "(xxhash: it must be set)."
)
_NAMED: Final = 3  # engines of a kind that are named; chosen


class BlockHashing(NamedTuple):
    """An engine and by what it tells blocks apart, as ``hashing_of`` words it."""

    engine: str
    model: str
    told: str


def hashing_of(hello: EngineHello) -> str:
    """By what an engine tells blocks apart, in words; empty where it does not say."""
    return f"blocks of {hello.block_size} tokens, {hello.hashing}" if hello.hashing else ""


def disagreements(engines: Iterable[BlockHashing]) -> list[str]:
    """One sentence for each model whose engines hash blocks differently; what does not tell how it
    does agrees with all."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for each in engines:
        if each.told:
            kinds.setdefault(each.model, {}).setdefault(each.told, []).append(each.engine)
    return [_sentence(model, those) for model, those in kinds.items() if len(those) > 1]


def _sentence(model: str, kinds: dict[str, list[str]]) -> str:
    told = "; ".join(f"{_names(engines)}: {kind}" for kind, engines in kinds.items())
    return (
        f"Engines of {model!r} hash blocks differently ({told}): they find nothing of each "
        "other's, nor in a store that they share."
    )


def _names(engines: list[str]) -> str:
    more = len(engines) - _NAMED
    return ", ".join(map(repr, engines[:_NAMED])) + (f" and {more} more" if more > 0 else "")
