"""The graph's compiled loops; see ``core/``. Arrays are one-dimensional and without gaps; of an
argument that is said to be *out*, the first places take what is found.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .graph.tables.blocks import BlockTable
from .graph.tables.sessions import SessionTable
from .graph.tables.walks import Walk

_Keys = npt.NDArray[np.uint64]
_Rows = npt.NDArray[np.int32]
_Places = npt.NDArray[np.int64]
_Marks = npt.NDArray[np.uint8] | npt.NDArray[np.bool_]
_Doubles = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.uint32]
_Singles = npt.NDArray[np.float32]

_Unlinked = tuple[int, bytes, bytes]
_Facts = tuple[int, int, int, float]

def find(slots: _Rows, column: _Keys, keys: _Keys, out: _Rows, /) -> None: ...
def claim(
    slots: _Rows,
    column: _Keys,
    alive: _Marks,
    keys: _Keys,
    rows: _Rows,
    first: _Places,
    taken: _Places,
    looked_for: bool,
    /,
) -> int: ...
def settle(
    slots: _Rows,
    column: _Keys,
    keys: _Keys,
    taken_rows: _Rows,
    first: _Places,
    taken: _Places,
    rows: _Rows,
    new: _Marks,
    /,
) -> None: ...
def place(slots: _Rows, rows: _Rows, keys: _Keys, /) -> None: ...
def place_all(column: _Keys, alive: _Marks, first: int, end: int, slots: _Rows, /) -> None: ...
def remove(slots: _Rows, column: _Keys, rows: _Rows, /) -> int: ...
def find_chains(
    slots: _Rows,
    column: _Keys,
    alive: _Marks,
    depth: _Rows,
    chains: list[bytes],
    salt: int,
    guesses: list[_Rows | None],
    keys: _Keys,
    rows: _Rows,
    /,
) -> tuple[int, list[bool] | None]: ...
def lay(
    blocks: BlockTable, rows: _Rows, new: _Marks | None, counts: list[int], now: float, /
) -> _Unlinked | None: ...
def extend(
    blocks: BlockTable, rows: _Rows, new: _Marks, follows: bytes, counts: _Places, /
) -> _Unlinked | None: ...
def refresh(
    columns: list[npt.NDArray[Any]],
    values: list[bytes],
    rows: _Rows,
    matrix: npt.NDArray[np.uint8] | None,
    /,
) -> None: ...
def chain(blocks: BlockTable, row: int, length: int, /) -> bytes: ...
def to_raise(
    blocks: BlockTable, row: int, parent: int, most: int, /
) -> tuple[int, bytes | None]: ...
def unlink(blocks: BlockTable, gone: _Marks, first: int, end: int, /) -> None: ...
def unheld(blocks: BlockTable, first: int, end: int, tiers: int, /) -> tuple[bytes, bytes]: ...
def walk(blocks: BlockTable, rows: _Rows, hits: int, size: int, now: float, /) -> None: ...
def begin_walk(
    blocks: BlockTable,
    sessions: SessionTable,
    session: int,
    rows: _Rows,
    engine: int,
    now: float,
    prompt_tokens: int,
    whole: bool,
    /,
) -> tuple[int, tuple[int, int, float, int] | None]: ...
def end_walk(
    blocks: BlockTable,
    sessions: SessionTable,
    session: int,
    rows: _Rows,
    now: float,
    prompt_tokens: int,
    tokens: int,
    /,
) -> bool: ...
def marked(
    marks: _Marks,
    blocks: BlockTable,
    engine: int,
    rows: _Rows,
    found: int,
    first: int,
    reach: int,
    prefetched: int,
    left: int,
    computing: int,
    /,
) -> tuple[int, bytes, int, _Facts | None]: ...
def unmark(marks: _Marks, blocks: BlockTable, engine: int, rows: _Rows, bit: int, /) -> bytes: ...
def written(
    blocks: BlockTable, rows: _Rows, prompt_tokens: int, layer: int, worth: float, /
) -> bytes: ...
def block(blocks: BlockTable, engine: int, row: int, /) -> _Facts: ...
def sibling(
    blocks: BlockTable, size: int, row: int, parent: int, session: int, now: float, /
) -> int | None: ...
def heads_nbytes(blocks: BlockTable, /) -> int: ...
def again(
    blocks: BlockTable,
    sessions: SessionTable,
    engine: int,
    session: int,
    rows: _Rows,
    tokens: int,
    computed: int,
    copies: int,
    now: float,
    /,
) -> int: ...
def reached(blocks: BlockTable, rows: _Rows, known: int, out: _Rows, /) -> None: ...
def overlap(keys: _Keys, others: _Keys, /) -> bool: ...
def note_held(pages: _Marks, rows: _Rows, /) -> None: ...
def held_rows(pages: _Marks, bits: _Marks, tiers: int, out: _Rows, /) -> int: ...
def unhold(slots: _Rows, column: _Keys, tiers: _Marks, keys: _Keys, /) -> bytes: ...
def hold(
    blocks: BlockTable,
    engine: int,
    protected: _Marks,
    rows: _Rows,
    counts: _Places,
    sizes: npt.NDArray[np.uint16],
    claims: _Rows,
    /,
) -> int: ...
def tally(blocks: BlockTable, protected: _Marks, rows: _Rows, kinds: int, /) -> list[int]: ...
def churn(
    events: Sequence[object], stored: type, /
) -> tuple[bytes, int, bytes, bytes, bytes, list[str | None] | None, bytes, int]: ...
def churn_parts(events: Sequence[object], stored: type, /) -> list[int]: ...
def run_end(
    events: Sequence[object], first: int, types: tuple[type, ...], most: int, least: int, /
) -> tuple[int, int]: ...
def departed(
    blocks: BlockTable,
    sessions: SessionTable,
    over: int,
    protected: _Marks,
    rows: _Rows,
    places: npt.NDArray[np.uint16],
    codes: bytes,
    is_lru: bool,
    rules: _Marks,
    used: _Doubles,
    /,
) -> bool: ...
def depart(
    ring: _Marks,
    slots: npt.NDArray[np.uint16],
    marks: _Marks,
    keys: _Keys,
    blocks: BlockTable,
    engine: int,
    sessions: SessionTable,
    rows: _Rows,
    places: npt.NDArray[np.uint16],
    rules: _Marks,
    used: _Doubles,
    by_rule: _Places,
    first: int,
    most: int,
    ticks: int,
    gone: int,
    unowned: int,
    now: float,
    /,
) -> None: ...
def begin_turn(
    sessions: SessionTable,
    row: int,
    engine: int,
    now: float,
    prompt_tokens: int,
    reach: int,
    tip: int,
    /,
) -> tuple[int, int, float, int] | None: ...
def end_turn(
    sessions: SessionTable, row: int, tip: int, now: float, prompt_tokens: int, tokens: int, /
) -> bool: ...
def lower(scores: _Doubles, above: _Places, lengths: _Places | None, /) -> None: ...
def highest_of_runs(
    scores: _Doubles, lengths: _Places, among: _Marks, runs: _Places, offsets: _Places, /
) -> int: ...
def runs(
    parent: _Rows,
    depth: _Rows,
    children: _Counts,
    rows: _Rows,
    columns: list[npt.NDArray[Any]],
    begins: _Marks,
    starts: _Places,
    /,
) -> int: ...
def is_any(marks: _Marks, values: _Marks, rows: _Rows, /) -> bool: ...
def keys_of_runs(
    firsts: _Rows,
    then: _Doubles,
    runs: _Places,
    offsets: _Places,
    created: _Doubles,
    keys: _Keys,
    salt: int,
    marks: _Marks,
    out: _Keys,
    marked: _Keys,
    /,
) -> tuple[int, int]: ...
def highest(scores: _Doubles, among: _Marks, out: _Places, /) -> int: ...
def gather(
    columns: list[npt.NDArray[Any]], rows: _Rows, out: list[npt.NDArray[Any]], place: int, /
) -> None: ...
def parents(rows: _Rows, parent: _Rows, out: _Places, /) -> None: ...
def gittins(rates: _Doubles, borders: _Doubles, ages: _Doubles, best: _Doubles, /) -> None: ...
def credit(
    states: _Marks,
    seen: _Doubles,
    expected: _Doubles,
    turns: _Rows,
    inferred: _Marks,
    reached: _Doubles,
    ended: _Doubles,
    prior: _Doubles,
    strength: float,
    rows: _Rows,
    now: float,
    memory_s: float,
    out: _Doubles,
    /,
) -> None: ...
def inputs(features: _Singles, scales: _Singles, farthest: float, out: _Singles, /) -> None: ...
def biased(
    lines: _Singles,
    bases: _Singles,
    units: int,
    least: float,
    most: float,
    out: _Singles | None,
    /,
) -> None: ...
def swish(lines: _Singles, exponentials: _Singles, /) -> None: ...
def exposure(
    ages: _Doubles,
    returned: _Marks,
    borders: _Doubles,
    shares: _Singles,
    spent: _Singles,
    events: _Singles,
    /,
) -> None: ...
def blame(
    logarithms: _Singles,
    rates: _Singles,
    spent: _Singles,
    events: _Singles,
    bins: int,
    smooth: float,
    /,
) -> None: ...
def back(slopes: _Singles, factors: _Singles | None, units: int, sums: _Singles, /) -> None: ...
def moments(
    slopes: _Singles, means: _Singles, squares: _Singles, warm: float, out: _Singles, /
) -> None: ...
def descend(
    weights: _Singles,
    means: _Singles,
    roots: _Singles,
    prior: _Singles,
    warm: float,
    step: float,
    pull: float,
    /,
) -> None: ...
def features(*columns_rows_and_out: npt.NDArray[Any]) -> None: ...
def by_session(
    depth: _Rows,
    session: _Rows,
    attended: _Doubles,
    claims: _Doubles,
    ends: _Rows,
    begins: _Doubles,
    scores: _Doubles,
    off: _Marks,
    /,
) -> None: ...
def chain_worth(
    parent: _Rows,
    depth: _Rows,
    walkers: _Counts,
    children: _Counts,
    shared_children: _Counts,
    children_walks: _Counts,
    importance: npt.NDArray[np.float32],
    weights: _Doubles,
    worth: _Doubles,
    /,
) -> None: ...
def lru(
    starts: _Places, blocks: _Rows, limits: _Rows, known: int, capacity: int, hits: _Rows, /
) -> None: ...
def belady(
    starts: _Places,
    blocks: _Rows,
    limits: _Rows,
    known: int,
    capacity: int,
    prompts: _Rows,
    depths: _Rows,
    hits: _Rows,
    /,
) -> None: ...

class BlockColumns:
    """Where a block table's columns are: under ``bound`` in it, for the loops that take a table."""

class SessionColumns:
    """The same of a session table."""

class LruStack:
    def __init__(self, capacities: list[int], /) -> None: ...
    def found(self, rows: _Rows, keys: _Keys, /) -> list[int]: ...
    def use(self, rows: _Rows, keys: _Keys, /) -> None: ...
    def follow(self, walks: Sequence[Walk], keys: _Keys, /) -> list[int]: ...
    def nbytes(self) -> int: ...

class RankedPools:
    def join(self, capacity: int, /) -> int: ...
    def leave(self, pool: int, /) -> None: ...
    def resize(self, pool: int, capacity: int, /) -> None: ...
    def found(self, rows: _Rows, keys: _Keys, /) -> list[int]: ...
    def use(self, rows: _Rows, keys: _Keys, /) -> None: ...
    def seed(self, pool: int, rows: _Rows, keys: _Keys, /) -> None: ...
    def rows(self, pool: int, keys_now: _Keys, /) -> bytes: ...
    def adopt(
        self, pool: int, firsts: _Rows, scores: _Doubles, lengths: _Places | None, /
    ) -> None: ...
    def use_up(self, pool: int, /) -> None: ...
    def held(self, pool: int, /) -> int: ...
    def used(self, rows: _Rows, out: _Places, /) -> None: ...
    def follow(self, walks: Sequence[Walk], keys: _Keys, pool: int, /) -> list[int]: ...
    def nbytes(self) -> int: ...
