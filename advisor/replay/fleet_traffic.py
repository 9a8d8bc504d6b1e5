"""`kvgraph traffic`: distributes recorded sessions over users, and writes the fleet as a trace."""

from __future__ import annotations

import gzip
import heapq
import random
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple, cast

import msgspec
import typer
from rich.console import Console

from .cli import check_writable
from .reader import HEADER_VERSION, whole_file
from .recorded_sessions import RecordedTurn, Session, read_sessions
from .trace import ReplayError

MAX_GAP_S: Final = 1800.0
"""Seconds to which pauses inside a session are cut: a user who is away longer is not working."""


LEAST_S: Final = 1.0
"""Least seconds that a session takes its user, even if none of its times were recorded; otherwise
it would never end.
"""


@dataclass(frozen=True, slots=True)
class FleetRequest:
    at: float  # seconds since the fleet began
    user: int
    run: str  # name of this run of the session; a session played again has another
    scope: str  # the run in which its recorded block numbers hold: a subagent's is its parent's
    session: Session
    index: int  # index of the turn in ``session``
    # Seconds until the session's next request, cut; None after the last one.
    returns_s: float | None
    lap: int = 1  # how often the fleet has begun its sessions anew by then, from 1

    @property
    def turn(self) -> RecordedTurn:
        return self.session.turns[self.index]

    @property
    def next_turn(self) -> RecordedTurn | None:
        after = self.index + 1
        return self.session.turns[after] if after < len(self.session.turns) else None

    @property
    def pause_s(self) -> float | None:
        """Return the seconds from the end of the answer to the session's next request."""
        if self.returns_s is None:
            return None
        return max(0.0, self.returns_s - (self.turn.api_s or 0.0))


class _Run(NamedTuple):
    name: str
    scope: str
    session: Session
    lap: int


def lay_over_users(
    sessions: Sequence[Session], users: int, seconds: float, seed: int
) -> list[FleetRequest]:
    """Return the requests of a fleet in order of arrival; the same seed gives the same fleet.

    Users draw sessions from one shuffled pile, each the next one when the last has ended. A used-up
    pile is reshuffled, and a session played again counts as another session. Users start within the
    first ``MAX_GAP_S``. Raises ReplayError.
    """
    if not sessions or users < 1 or seconds <= 0:
        raise ReplayError("a fleet needs at least one session, one user and some time")
    requests: list[FleetRequest] = []
    pile = _pile(sessions, random.Random(f"{seed}/order"))
    starts = random.Random(f"{seed}/starts")
    free = sorted((starts.uniform(0.0, MAX_GAP_S), user) for user in range(users))
    while free[0][0] < seconds:
        at, user = free[0]
        run = next(pile)
        requests += _play(run, user, at)
        busy_s = _offsets(run.session)[-1] + (run.session.turns[-1].api_s or 0.0)
        heapq.heapreplace(free, (at + max(LEAST_S, busy_s), user))
    return sorted((r for r in requests if r.at < seconds), key=lambda r: (r.at, r.run, r.index))


def in_harnesses(sessions: Sequence[Session], count: int, seed: int) -> list[Session]:
    """Return the sessions as if ``count`` agent harnesses ran them all; deterministic by seed.

    A harness has the tools and the system prompt of one of the sessions, with the recorded lengths;
    sessions are distributed evenly. Prompts keep their lengths: a session with a shorter head gets
    that much of the harness's head, and the excess of a longer one is its own text. Raises
    ReplayError.
    """
    if not 1 <= count <= len(sessions):
        raise ReplayError(f"--harnesses {count}: allowed: 1 to {len(sessions)}, the sessions")
    order = list(sessions)
    random.Random(f"{seed}/harnesses").shuffle(order)
    numbers = {session.name: place % count for place, session in enumerate(order)}
    return [
        _with_head(each, order[numbers[each.name]], f"harness {numbers[each.name] + 1}")
        for each in sessions
    ]


def _with_head(session: Session, pattern: Session, harness: str) -> Session:
    """Give a session, and subagents with the same head, as much of another's head as fits."""
    own = session.tool_tokens + session.system_tokens
    tools = min(pattern.tool_tokens, own)
    return replace(
        session,
        tool_tokens=tools,
        system_tokens=min(pattern.tool_tokens + pattern.system_tokens, own) - tools,
        subagents=tuple(
            _with_head(agent, pattern, harness) if _head(agent) == _head(session) else agent
            for agent in session.subagents
        ),
        harness=harness,
    )


def _head(session: Session) -> tuple[int, int]:
    return session.tool_tokens, session.system_tokens


def _pile(sessions: Sequence[Session], rng: random.Random) -> Iterator[_Run]:
    lap = 0
    while True:
        lap += 1
        order = list(sessions)
        rng.shuffle(order)
        for session in order:
            name = session.name if lap == 1 else f"{session.name}@{lap}"
            yield _Run(name, name, session, lap)


def _play(run: _Run, user: int, start: float) -> Iterator[FleetRequest]:
    """Yield the requests of a session that begins at ``start``, and those of its subagents."""
    name, scope, session, lap = run
    offsets = _offsets(session)
    for index, offset in enumerate(offsets):
        after = offsets[index + 1] - offset if index + 1 < len(offsets) else None
        yield FleetRequest(start + offset, user, name, scope, session, index, after, lap)
    for number, agent in enumerate(session.subagents, 1):
        begins = start + _when(session, offsets, agent)
        yield from _play(_Run(f"{name}.{number}", scope, agent, lap), user, begins)


def _offsets(session: Session) -> list[float]:
    """Return the seconds from a session's first request to each, with pauses cut."""
    offsets = [0.0]
    for turn, after in pairwise(session.turns):
        offsets.append(offsets[-1] + min(after.at - turn.at, MAX_GAP_S))
    return offsets


def _when(session: Session, offsets: Sequence[float], agent: Session) -> float:
    """Return the seconds from a session's first request to its subagent's, with pauses cut."""
    turns = enumerate(session.turns)
    before = max((i for i, turn in turns if turn.at <= agent.began), default=0)
    return offsets[before] + min(agent.began - session.turns[before].at, MAX_GAP_S)


MAGNITUDE: Final = 4.0  # a tool's pause is stated within this factor

_LEAST_PAUSE_S: Final = 0.5  # recorded times are whole seconds: a pause of 0 is up to half a one
_WAITING: Final = {"tool_use": True, "end_turn": False, "stop_sequence": False}


class Signals(StrEnum):
    """How much callers state; each level is what a client of that kind can know."""

    NONE = "none"  # nothing
    ENDS = "ends"  # that a session has ended, with its last request
    STOPS = "stops"  # why answers ended, which an engine could see by itself
    ALL = "all"  # ends, why answers ended, and roughly how long a tool takes


def waiting_for_tool(request: FleetRequest) -> bool | None:
    """Return whether the answer ended in a tool call or else the turn; None if unknown."""
    return _WAITING.get(request.turn.stop)


def rough_return_s(request: FleetRequest, seed: int) -> float | None:
    """Return the pause of a tool call, wrong by up to ``MAGNITUDE``; None without one."""
    if request.pause_s is None or not waiting_for_tool(request):
        return None
    error = random.Random(f"{seed}/return/{request.run}/{request.index}").uniform(-1.0, 1.0)
    return round(float(max(request.pause_s, _LEAST_PAUSE_S) * MAGNITUDE**error), 3)


def layers(request: FleetRequest) -> list[tuple[str, int, int]]:
    """Return the parts of a prompt's head: ``(source layer, first token, end token)``."""
    tools = min(request.session.tool_tokens, request.turn.input_tokens)
    head = min(tools + request.session.system_tokens, request.turn.input_tokens)
    parts = [("capabilities", 0, tools), ("rules", tools, head)]
    return [part for part in parts if part[1] < part[2]]


_FIRST: Final = -1  # block before the first one


class BlockNumbers:
    """Numbers blocks of ``block_size`` tokens across the sessions of a fleet.

    A block is identified by the number of the recorded block at its end, which stands for the whole
    prefix. Sessions with tools of equal length share these, and after them the system prompt if its
    length is equal too, in whole blocks. Sessions of one harness share the common part of their
    heads, with no other sessions. A subagent shares with its parent as far as their recorded
    numbers agree. If numbers are global, equal numbers after equal ones are one block, until the
    fleet plays its sessions again: then only heads are shared. Raises ReplayError.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[Hashable, int] = {}
        self._heads: dict[str, dict[int, int]] = {}  # session → number → place

    def prompt(self, request: FleetRequest) -> list[int]:
        return self._chain(request, request.turn.hash_ids)

    def answer(self, request: FleetRequest) -> list[int]:
        """Return a number for each full block that the answer completes.

        If the session's next prompt extends this prompt and its answer, these are that prompt's
        blocks. An answer that the next prompt does not contain unchanged (reasoning is removed, a
        history is cut) still fills blocks, which no request asks for again. The last token of an
        answer is never computed, so a block that it completes is not kept.
        """
        turn, after = request.turn, request.next_turn
        total = turn.input_tokens + turn.output_tokens
        first, end = turn.input_tokens // self._size, max(0, total - 1) // self._size
        if after is not None and after.input_tokens >= total and _extends(after, turn):
            return self._chain(request, after.hash_ids)[first:end]
        return [self._number((request.run, request.index, place)) for place in range(first, end)]

    def _chain(self, request: FleetRequest, hash_ids: array[int]) -> list[int]:
        step = self._step(request.session)
        if request.session.is_global and not request.session.harness:
            return self._global_chain(request, hash_ids, step)
        head = self._head(request.session, step)
        chain = []
        for hash_id in hash_ids[step - 1 :: step]:
            name: Hashable = (request.scope, hash_id)
            if (place := head.get(hash_id)) is not None:
                name = self._head_name(request.session, place)
            chain.append(self._number(name))
        return chain

    def _head_name(self, session: Session, place: int) -> Hashable:
        if session.harness:
            return session.harness, place
        if (place + 1) * self._size <= session.tool_tokens:
            return session.tool_tokens, place
        return session.tool_tokens, session.system_tokens, place

    def _global_chain(self, request: FleetRequest, hash_ids: array[int], step: int) -> list[int]:
        session, chain, before = request.session, list[int](), _FIRST
        head = (session.tool_tokens + session.system_tokens) // self._size
        for place, end in enumerate(range(step, len(hash_ids) + 1, step)):
            lap = 1 if place < head else request.lap
            before = self._number((lap, before, hash_ids[end - step : end].tobytes()))
            chain.append(before)
        return chain

    def _number(self, name: Hashable) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _head(self, session: Session, step: int) -> dict[int, int]:
        """Return recorded number → place in the head, for the whole blocks of a session's head."""
        if session.name not in self._heads:
            blocks = (session.tool_tokens + session.system_tokens) // self._size
            ends = session.turns[0].hash_ids[step - 1 :: step][:blocks]
            self._heads[session.name] = {hash_id: place for place, hash_id in enumerate(ends)}
        return self._heads[session.name]

    def _step(self, session: Session) -> int:
        step, rest = divmod(self._size, session.block_size)
        if rest or not step:
            raise ReplayError(
                f"--block {self._size}: allowed: a multiple of {session.block_size}, "
                f"the block size of {session.name}"
            )
        return step


def _extends(after: RecordedTurn, turn: RecordedTurn) -> bool:
    return after.hash_ids[: len(turn.hash_ids)] == turn.hash_ids


def trace_lines(
    requests: Sequence[FleetRequest],
    block_size: int,
    signals: Signals,
    seed: int,
    *,
    with_layers: bool = False,  # whether callers also state where the parts of a prompt's head are
) -> Iterator[dict[str, Any]]:
    """Yield the header, and one line per request; raises ReplayError."""
    yield {"kvgraph_trace": HEADER_VERSION, "block_size": block_size}
    numbers = BlockNumbers(block_size)
    for request in requests:
        turn = request.turn
        line: dict[str, Any] = {
            "at": round(request.at, 3),
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "session": request.run,
            **_said(request, signals, seed),
            **({"layers": layers(request)} if with_layers else {}),
            "hash_ids": numbers.prompt(request),
            "output_hash_ids": numbers.answer(request),
        }
        if turn.api_s is not None:
            line["seconds"] = turn.api_s
        yield line


def write_trace(lines: Iterator[dict[str, Any]], path: Path) -> int:
    """Write a trace, gzipped if named ``.gz``; returns the number of lines. Raises TraceError."""
    count = 0
    with whole_file(path) as raw, _zipped(raw) if path.suffix == ".gz" else raw as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")
            count += 1
    return count


def _zipped(raw: BinaryIO) -> BinaryIO:
    """Open a gzip file without the time of day in it, so that equal lines give equal files."""
    return cast(BinaryIO, gzip.GzipFile("", "wb", fileobj=raw, mtime=0))


def _said(request: FleetRequest, signals: Signals, seed: int) -> dict[str, Any]:
    """Return the fields that a caller states; unknown ones are absent."""
    said: dict[str, Any] = {}
    if signals in (Signals.ENDS, Signals.ALL) and request.next_turn is None:
        said["ended"] = True
    if signals in (Signals.STOPS, Signals.ALL):
        said["waiting_for_tool"] = waiting_for_tool(request)
    if signals is Signals.ALL:
        said["expected_return_s"] = rough_return_s(request, seed)
    return {name: value for name, value in said.items() if value is not None}


def traffic(
    sessions: Annotated[Path, typer.Argument(help="A Weka session, or a directory of them.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="The trace to write or replace; gzipped if it ends in .gz."
        ),
    ],
    users: Annotated[int, typer.Option(min=1, max=10_000, help="Users who work in parallel.")] = 40,
    hours: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Hours that the fleet works.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the order, and of callers' guesses.")] = 1,
    block: Annotated[int, typer.Option(min=1, max=65_535, help="Tokens per block.")] = 512,
    signals: Annotated[
        Signals,
        typer.Option(
            help="What callers say: nothing; when sessions end; why answers stopped; or all of it, "
            "and roughly how long tools take."
        ),
    ] = Signals.NONE,
    layers: Annotated[
        bool, typer.Option("--layers", help="Callers also say where tools and rules are.")
    ] = False,
    harnesses: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Heads (tools, then system prompt) that all sessions have between them; else "
            "sessions share tools of equal length, and the system prompt if that is equal, too.",
        ),
    ] = None,
) -> None:
    """Lay recorded agent sessions over users: a fleet, as a trace for `kvgraph replay`."""
    check_writable("--out", out, replaced=True)  # many users take minutes
    with Console(stderr=True).status("reading sessions") as status:
        found = read_sessions(
            sessions, progress=lambda files: status.update(f"reading sessions: {files}")
        )
        if harnesses is not None:
            found = in_harnesses(found, harnesses, seed)
        status.update("laying them over users")
        requests = lay_over_users(found, users, hours * 3600, seed)
        if not requests:
            raise ReplayError(
                f"--hours {hours:g}: no user has begun by then; users begin within the first "
                f"{MAX_GAP_S / 60:.0f} minutes"
            )
        status.update(f"writing {out.name}")
        lines = trace_lines(requests, block, signals, seed, with_layers=layers)
        write_trace(lines, out)
    runs = len({request.run for request in requests})
    typer.echo(f"{len(requests):,} requests of {runs:,} sessions written to {out}", err=True)
