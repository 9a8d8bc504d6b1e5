"""What a router knows of its engines, in columns: who takes requests, how fast, and how much waits
there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .measured_speeds import Floats, Mask, MeasuredSpeeds

Tokens = npt.NDArray[np.int64]

_GROWTH: Final = 64  # engines for which a column has room at first; chosen
MOST_REFUSING: Final = 8
"""Requests in a row that an engine refused, beyond which one more says nothing new; chosen."""
_UNKNOWN_POOL: Final = 500_000  # tokens of pools where no engine says how large its own is; chosen


@dataclass(frozen=True, slots=True)
class Speed:
    """What an engine is taken to do until it is measured; only prefill is measured so far.

    The defaults are chosen: an 8B model on a GPU whose host memory is behind PCIe 5, and a store
    behind a network of 40 Gbit/s.

    Attributes:
        prefill_tokens_per_s: Prompt tokens computed per second.
        load_bytes_per_s: Bandwidth of its own host memory.
        store_bytes_per_s: Bandwidth of a store that engines share.
        bytes_per_token: KV of one token, all layers: an 8B model's in bf16 has 131,072.
        pool_tokens: Tokens that its pool holds; 0: unknown.
    """

    prefill_tokens_per_s: float = 20_000.0
    load_bytes_per_s: float = 50e9
    store_bytes_per_s: float = 5e9
    bytes_per_token: int = 131_072
    pool_tokens: int = 0


class EngineBoard:
    """Columns over engines; an engine's number is its place in them, for good.

    Attributes:
        names: One per engine.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._floats = np.zeros((4, _GROWTH))
        self._tokens = np.zeros((5, _GROWTH), dtype=np.int64)
        self._marks = np.zeros((2, _GROWTH), dtype=np.bool_)
        self._speeds = MeasuredSpeeds()

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, speed: Speed | None = None) -> int:
        """Add an engine that takes requests; returns its number."""
        number = len(self.names)
        if number == self._floats.shape[1]:
            self._grow()
        speed = speed or Speed()
        self.names.append(name)
        per_token = speed.bytes_per_token
        self._floats[:, number] = (
            1 / speed.prefill_tokens_per_s,
            per_token / speed.load_bytes_per_s,
            per_token / speed.store_bytes_per_s,
            0.0,
        )
        self._tokens[:, number] = (0, 0, speed.pool_tokens, 0, 0)
        self._marks[:, number] = (True, False)
        self._speeds.add()
        self._take_speeds()  # as the others, once any was timed
        return number

    @property
    def compute_s(self) -> Floats:
        """float64 ``[engines]``: seconds to compute a token of a prompt."""
        return self._floats[0, : len(self)]

    @property
    def load_s(self) -> Floats:
        """float64 ``[engines]``: seconds to load a token's KV from the engine's own copies."""
        return self._floats[1, : len(self)]

    @property
    def fetch_s(self) -> Floats:
        """float64 ``[engines]``: seconds to fetch a token's KV from the shared store."""
        return self._floats[2, : len(self)]

    @property
    def asked(self) -> Floats:
        """float64 ``[engines]``: prompt tokens sent there lately, found or computed; they count
        half each time that the fleet got as many tokens as all its pools hold."""
        return self._floats[3, : len(self)]

    @property
    def waiting(self) -> Tokens:
        """int64 ``[engines]``: tokens of requests that are queued or running there."""
        return self._tokens[0, : len(self)]

    @property
    def live(self) -> Tokens:
        """int64 ``[engines]``: tokens of the live sessions whose home it is."""
        return self._tokens[1, : len(self)]

    @property
    def pool(self) -> Tokens:
        """int64 ``[engines]``: tokens that its pool holds; 0: unknown."""
        return self._tokens[2, : len(self)]

    @property
    def fresh(self) -> Tokens:
        """int64 ``[engines]``: of ``live``, tokens of sessions that have had one turn so far."""
        return self._tokens[3, : len(self)]

    @property
    def refusing(self) -> Tokens:
        """int64 ``[engines]``: requests in a row that it refused, ``MOST_REFUSING`` at most."""
        return self._tokens[4, : len(self)]

    @property
    def up(self) -> Mask:
        """bool ``[engines]``: whether it answers."""
        return self._marks[0, : len(self)]

    @property
    def timed(self) -> Mask:
        """bool ``[engines]``: whether its speed was measured."""
        return self._speeds.timed

    @property
    def takes(self) -> Mask:
        """bool ``[engines]``: whether it gets requests."""
        return self.up & ~self.draining

    @property
    def draining(self) -> Mask:
        """bool ``[engines]``: whether it shall get no further requests."""
        return self._marks[1, : len(self)]

    def ask(self, number: int, tokens: int) -> None:
        """Note that an engine was asked for a prompt of ``tokens``."""
        known = self.pool[self.pool > 0]
        pools = len(self) * (float(known.mean()) if len(known) else _UNKNOWN_POOL)
        asked = self.asked
        asked *= 0.5 ** (tokens / pools)
        asked[number] += tokens

    def heard(self, number: int, refused: bool) -> None:
        """Note whether an engine refused a request, or began to answer it."""
        before = int(self.refusing[number])
        self.refusing[number] = min(MOST_REFUSING, before + 1) if refused else 0

    def measured(self, number: int, tokens: int, seconds: float) -> None:
        """Note that an engine computed ``tokens`` prompt tokens in ``seconds``.

        See ``MeasuredSpeeds`` for what is made of it.
        """
        if tokens <= 0 or seconds <= 0:
            return
        self._speeds.note(number, seconds / tokens)
        self._take_speeds()

    def _take_speeds(self) -> None:
        if (seconds := self._speeds.seconds()) is not None:
            self.compute_s[:] = seconds

    def _grow(self) -> None:
        for name in ("_floats", "_tokens", "_marks"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)], axis=1))
