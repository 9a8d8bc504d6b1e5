"""The output of ``kvgraph status``, ``open``, ``why`` and ``explain``."""

from __future__ import annotations

import contextlib
import html
import json
import re
import tempfile
import time
import webbrowser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...dashboards.access import page_address
from ...graph.errors import InUseError
from ...graph.wire.endpoints import runtime_dir
from ...graph.wire.events import REMEDY, BlockHashing, disagreements
from ..words.times import seconds
from ..words.waits import admission_facts
from ..words.words import beside_lru, ranker
from .remote import RemoteError, UnknownError, ask, secret_of, sidecar_urls

UrlOption = Annotated[
    str | None, typer.Option(help="A sidecar's URL; without it, all that this user runs.")
]
TableJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def plain(text: object) -> Text:
    """Return text without markup and control characters, which could move the cursor."""
    return Text(
        "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text)
        )
    )


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table with a row per fact: its name and text, both folded if too long."""
    table = Table(title=plain(title), show_header=False, title_justify="left")
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(plain(name), plain(text))
    return table


def engines_report(engines: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not engines:
        return Text("no engine is connected")
    return facts_table("engines", ((each["name"], "\n".join(_about(each))) for each in engines))


def _about(engine: Mapping[str, Any]) -> Iterator[str]:
    graph, age = engine["graph"] or {}, engine["ranking_age_s"]
    applied = graph.get("applied") or {}
    yield f"{engine['model']}, {engine['state']}"
    yield f"ranked by {_who_ranks(engine)}" + ("" if age is None else f", {age:.2f} s ago")
    counts = (applied.get("moved", "-"), applied.get("dropped", "-"), engine["gaps"])
    yield "{} blocks; moved {}, dropped {}, gaps {}".format(graph.get("resident", 0), *counts)
    if engine["hashing"]:
        yield engine["hashing"]
    if graph.get("budget") is not None:
        yield graph["protection"]


def _who_ranks(engine: Mapping[str, Any]) -> str:
    name, ruling = ranker(engine["ranked_by"]), engine["ruling"]
    return name if ruling is None else f"{name} (policy {beside_lru(ruling['ahead'])})"


def status(url: UrlOption = None, as_json: TableJsonOption = False) -> None:
    """Show the running sidecars: engines, blocks, sessions, what was lost."""
    answers = {each: ask(each, "/status") for each in sidecar_urls(url)}
    if as_json:
        typer.echo(json.dumps(list(answers.values())))
        return
    console = Console()
    for each, answer in answers.items():
        console.print(status_report(answer))
        if secret := secret_of(each):
            typer.echo(f"watch it at {page_address(each, secret)}")
    for said in hashing_warnings(chain.from_iterable(each["engines"] for each in answers.values())):
        typer.echo(said)


def status_report(status: Mapping[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_summary(status), engines_report(status["engines"])]
    for engine in status["engines"]:
        if facts := admission_facts(engine):
            parts.append(facts_report(f"admission of {engine['name']}", facts))
    parts += [_tiers(engine) for engine in status["engines"] if engine["tiers"]]
    return Group(*parts)


def hashing_warnings(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return warnings about engines, of any sidecars, that hash blocks differently."""
    told = (BlockHashing(each["name"], each["model"], each["hashing"]) for each in engines)
    return [f"{said} {REMEDY}" for said in disagreements(told)]


def facts_report(title: str, facts: Mapping[str, Any]) -> RenderableType:
    """Return a table of facts; nested ones are listed below their name."""
    return facts_table(title, ((name, _line(value)) for name, value in facts.items()))


def _summary(status: Mapping[str, Any]) -> RenderableType:
    graph, counters, snapshot = status["graph"], status["counters"], status["snapshot"]
    ingest = counters["ingest"]
    facts = {
        "endpoint": status["endpoint"],
        "blocks known": f"{graph['blocks']:,} in {graph['bytes'] / 1e6:.1f} MB",
        "edges": _pairs(graph["edges"]),
        "sessions": _pairs(graph["sessions"]),
        "events": f"{ingest.get('events', 0):,} in {ingest.get('messages', 0):,} messages",
        "refused": sum(count for name, count in ingest.items() if "refused" in name),
        "gaps": ingest.get("gaps", 0) + ingest.get("kv_gaps", 0),
        "engines lost": ingest.get("engines_lost", 0),
        "protected evicted": graph["counters"].get("protected_evicted", 0),
    }
    if spliced := graph["counters"].get("requests_spliced"):
        facts["recall"] = (
            f"{graph['counters']['tokens_spliced']:,} tokens came back at other positions, in "
            f"{spliced:,} requests"
        )
    if snapshot["error"]:
        facts["snapshot"] = snapshot["error"]
    if status["config"]["error"]:
        facts["configuration"] = status["config"]["error"]
    title = f"kvgraph {status['version']}, process {status['pid']}, {status['http']}"
    return facts_report(title, facts)


def _tiers(engine: Mapping[str, Any]) -> RenderableType:
    tiers, graph = engine["tiers"], engine["graph"]
    size, pool = tiers["bytes_per_block"], graph["pressure"] or {}
    facts = {
        "hot": _fill(graph["resident"], pool.get("total_blocks", 0), size),
        "warm": _fill(tiers["warm_blocks"], tiers["warm_capacity"], size),
        "cold": _fill(tiers["cold_blocks"], tiers["cold_capacity"], size),
        "spilled": _moved(tiers["spilled"], size, tiers["spill_bytes_per_s"]),
        "passed over": f"{tiers['passed_over']:,} evicted, and not worth a copy",
        "without a copy": f"{tiers['spill_lost']:,} lost before it was made, "
        f"{tiers['spill_failed']:,} failed, {tiers['dropped']:,} dropped for want of room",
        "brought back": _moved(
            tiers["loaded"] + tiers["prefetched"], size, tiers["load_bytes_per_s"]
        ),
        "stalls": f"{tiers['stalls']:,} requests waited {tiers['stall_s']:.2f} s in all for "
        f"{tiers['loaded']:,} blocks ({tiers['load_failed']:,} failed)",
        "computed instead": f"{tiers['recomputed']:,} blocks: judged faster than a load",
        "prefetch": _prefetch(tiers),
    }
    if tiers["reads_store"] or tiers["shared"]:
        facts["shared store"] = _store(tiers)
    return facts_report(f"tiers of {engine['name']}", facts)


def _fill(blocks: int, capacity: int, size: int) -> str:
    share = f", {100 * blocks / capacity:.0f} %" if capacity else ""
    return f"{blocks:,} of {capacity:,} blocks ({_bytes(blocks * size)}{share})"


def _moved(blocks: int, size: int, rate: float) -> str:
    speed = f", at {_bytes(rate)}/s" if rate else ""  # 0: not measured yet
    return f"{blocks:,} blocks, {_bytes(blocks * size)}{speed}"


def _prefetch(tiers: Mapping[str, Any]) -> str:
    useful, wasted = tiers["prefetch_useful"], tiers["prefetch_wasted"]
    known = useful + wasted
    accuracy = f"{100 * useful / known:.0f} % useful ({useful:,} of {known:,})" if known else "-"
    return (
        f"{accuracy}, {tiers['prefetched']:,} blocks ahead of demand, "
        f"{tiers['prefetch_cancelled']:,} not begun for want of room"
    )


def _store(tiers: Mapping[str, Any]) -> str:
    left = "" if tiers["reads_store"] else "; left alone until the engine is started again"
    return (
        f"{tiers['shared']:,} blocks given ({tiers['share_failed']:,} failed), "
        f"{tiers['store_loaded']:,} loaded ({tiers['store_failed']:,} promised and not given){left}"
    )


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value) or "none"


def _line(value: object) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_flat(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return "\n".join(map(_flat, value)) or "-"
    return "-" if value is None else str(value)


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_flat(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")]
_PREFIXES: Final = ("", "cmpl-", "chatcmpl-")  # put before a client's X-Request-Id by vLLM
_MOST: Final = 1_000  # requests of one answer; chosen
_LONGEST: Final = 256  # characters that can be searched for, by the API
_READ_WITHIN_S: Final = 10.0  # seconds for a browser to start and read a file; chosen
_LEADING_ON: Final = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>kvgraph</title>
<a href="{address}">kvgraph's page</a>
"""


def open_page(
    url: UrlOption = None,
    edit: Annotated[bool, typer.Option("--edit", help="Let the page change weights.")] = False,
    browser: Annotated[bool, typer.Option(help="Open it in a browser too.")] = True,
) -> None:
    """Print the page's address, with the token that opens it, and open it."""
    addresses = [_address(each, edit=edit) for each in sidecar_urls(url)]
    for each in addresses:
        typer.echo(each)
    if browser:
        _show(addresses)


def _address(url: str, *, edit: bool) -> str:
    secret = secret_of(url)
    if not secret:
        raise RemoteError(
            f"no sidecar of this user runs at {url}; for one of another user or machine, set "
            "KVGRAPH_SIDECAR__TOKEN to its token"
        )
    return page_address(url, secret, edit=edit)


def _show(addresses: Sequence[str]) -> None:
    # Every user of a machine can read a browser's command line, so it gets only names of private
    # files. Ctrl-C ends the wait.
    with contextlib.ExitStack() as kept, contextlib.suppress(KeyboardInterrupt):
        files = [kept.enter_context(leading_to(each)) for each in addresses]
        opened = [webbrowser.open(each.as_uri()) for each in files]
        if any(opened):
            time.sleep(_READ_WITHIN_S)


@contextlib.contextmanager
def leading_to(address: str) -> Iterator[Path]:
    """Create a private page in the runtime directory that redirects a browser to ``address``."""
    folder = runtime_dir()
    try:
        number, name = tempfile.mkstemp(prefix="open-", suffix=".html", dir=folder)
    except OSError as error:
        raise InUseError(f"runtime directory {str(folder)!r}: {error.strerror}") from None
    path = Path(name)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(_LEADING_ON.format(address=html.escape(address)))
        yield path
    finally:
        path.unlink(missing_ok=True)


def why(
    target: Annotated[str, typer.Argument(help="A request's id, or a session's name.")],
    url: UrlOption = None,
    last: Annotated[
        int, typer.Option(min=1, help="How many of its requests, the newest first.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Say why a request, or a session's last one, found no more of its prompt in the cache."""
    found: list[Mapping[str, Any]] = []
    held: list[Mapping[str, Any]] = []
    for sidecar in sidecar_urls(url):
        found += [request for _, request in requests_of([sidecar], target)]
        waiting = ask(sidecar, "/waiting").items()
        held += [{"request": name, "held_s": s} for name, s in waiting if _is_of(name, target)]
        if not held:
            held += [{"session": target, "why": words} for words in _why_held(sidecar, target)]
    if not found and not held:
        raise UnknownError(
            f"no request or session {target!r} is among those that the sidecar remembers, and no "
            "request of that id waits"
        )
    newest = sorted(found, key=lambda request: -request["at"])[:last]
    if as_json:
        typer.echo(json.dumps([*held, *newest]))
        return
    for each in held:
        typer.echo(plain(held_sentence(each)).plain)
    for request in newest:
        typer.echo(plain(why_sentence(request)).plain)


def requests_of(urls: Sequence[str], target: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the requests with this id, or else of this session, each with its sidecar's URL."""
    asked = f"/v1/requests?limit={_MOST}&search={quote(target[:_LONGEST], safe='')}"
    for url in urls:
        for request in matching(ask(url, asked)["requests"], target):
            yield url, request


def matching(requests: Sequence[Mapping[str, Any]], target: str) -> list[Mapping[str, Any]]:
    """Return the requests with this id, or else of this session.

    The engine's id of a request is ``ID-0-1f3a5b7c`` if the client's is ``ID``: vLLM appends the
    prompt's index and a random part. ``ID`` is ``chatcmpl-NAME`` if the client's ``X-Request-Id``
    is ``NAME``.
    """
    own = [each for each in requests if each["request"] == target]
    own = own or [each for each in requests if _is_of(each["request"], target)]
    return own or [each for each in requests if each["session"] == target]


def _is_of(request: str, target: str) -> bool:
    """Whether ``request`` is this id, or the engine's id for it."""
    names = [prefix + target for prefix in _PREFIXES]
    return request in names or request.startswith(tuple(f"{name}-" for name in names))


def _why_held(url: str, session: str) -> Sequence[str]:
    """Why the session's next request has not begun; empty if none waits."""
    try:
        facts = ask(url, f"/sessions/{quote(session, safe='')}/explain")
    except UnknownError:
        return ()
    return cast(Sequence[str], facts.get("why", ()))


def held_sentence(held: Mapping[str, Any]) -> str:
    """Describe why a request, or the next one of a session, has not begun."""
    if "session" in held:
        return f"The next request of session {held['session']} has not begun: {held['why']}."
    return (
        f"Request {held['request']} has not begun: most of its context is not in the pool, and "
        f"for {seconds(held['held_s'])} it has waited for room; kvgraph status says how many "
        "sessions fit."
    )


def why_sentence(request: Mapping[str, Any]) -> str:
    """Describe what a request found, why no more, and what would have made it faster."""
    blocks, miss = request["blocks"], request["miss"]
    parts = [f"{blocks['pool']} in the pool"]
    parts += [
        f"{blocks[name]} {name}" for name in ("loaded", "prefetched", "spliced") if blocks[name]
    ]
    session = f" of session {request['session']}" if request["session"] else ""
    head = (
        f"Request {request['request']}{session}: {request['prompt_tokens']:,} tokens, "
        f"{blocks['asked']} blocks; {', '.join(parts)}, {blocks['computed']} computed."
    )
    said = [head, *_took(request)]
    said += [request["wait"]["sentence"]] if request["wait"] else []
    said += [miss["sentence"]] if miss else []
    said += [f"What would have {_bought(each)}: {each['text']}" for each in request["remedies"]]
    return " ".join(said)


def _bought(remedy: Mapping[str, Any]) -> str:
    return f"saved up to {seconds(remedy['saves_s'])}" if remedy["saves_s"] else "helped"


def _took(request: Mapping[str, Any]) -> Iterator[str]:
    waited, ended = request["waited_s"], request["ended_at"]
    if ended is not None:
        queued = f", {seconds(waited)} of it in the queue" if request["wait"] else ""
        yield f"It took {seconds(waited + max(0.0, ended - request['at']))}{queued}."
    elif request["wait"]:
        yield f"It waited {seconds(waited)}."


# A block's key, or the first digits of one.
_HEXADECIMAL: Final = re.compile(r"(0x)?[0-9a-f]+(…|\.\.\.)?", re.IGNORECASE)
_WHOLE_KEY: Final = (
    "a block is named by its whole key: a decimal number, or 0x and up to 16 hexadecimal digits"
)
_MEMORY: Final = "memory:"
_LISTED: Final = 20  # sessions; chosen, to fit a screen


def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A block (decimal or 0x…), a session, the id of a request, or memory:ID; without "
            "one, the sessions are listed."
        ),
    ] = None,
    url: UrlOption = None,
    tenant: Annotated[
        str | None, typer.Option(help="The session's tenant, if several have one of that name.")
    ] = None,
    as_json: TableJsonOption = False,
) -> None:
    """Say why a block ranks where it does, what a session does, or who recalls a memory."""
    urls = sidecar_urls(url)
    if not target:
        if tenant is not None:
            raise RemoteError("--tenant says whose session is meant: name the session, too")
        listed = {each: ask(each, f"/v1/sessions?limit={_LISTED}") for each in urls}
        tables = Group(*(_sessions_report(*each) for each in listed.items()))
        _print(list(listed.values()), tables, as_json)
        return
    answer = _explained(urls, target, tenant)
    _print(answer, facts_report(target, answer), as_json)


def _print(answer: Any, report: RenderableType, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        Console().print(report)


def _explained(urls: list[str], target: str, tenant: str | None) -> Any:
    try:
        return _first_answer(urls, _paths(target, tenant))
    except UnknownError as error:
        for url, request in requests_of(urls, target):
            if request["session"] and tenant in (None, request["tenant"]):
                return ask(url, _session_path(request["session"], request["tenant"]))
        if not _HEXADECIMAL.fullmatch(target):
            raise
        raise UnknownError(f"{error}; {_WHOLE_KEY}") from None


def _paths(target: str, tenant: str | None) -> list[str]:
    """Where to ask: a memory by its prefix; else a block, if it is a key; else a session."""
    if target.startswith(_MEMORY):
        return [f"/memories/{quote(target.removeprefix(_MEMORY), safe='')}/explain"]
    session = _session_path(target, tenant)
    block = f"/blocks/{quote(target, safe='')}/explain"
    return [block, session] if _is_block_key(target) else [session]


def _session_path(name: str, tenant: str | None) -> str:
    query = f"?tenant={quote(tenant, safe='')}" if tenant is not None else ""
    return f"/sessions/{quote(name, safe='')}/explain{query}"


def _is_block_key(text: str) -> bool:
    try:
        return 0 <= int(text, 16 if text[:2].lower() == "0x" else 10) < 1 << 64
    except ValueError:
        return False


def _first_answer(urls: list[str], paths: list[str]) -> Any:
    unknown: UnknownError | None = None
    for url in urls:
        for path in paths:
            try:
                return ask(url, path)
            except UnknownError as error:
                unknown = unknown or error
    raise unknown or RemoteError("nobody to ask")


def _sessions_report(url: str, answer: Mapping[str, Any]) -> RenderableType:
    shown = answer["sessions"]
    title = f"{len(shown)} of {answer['known']:,} sessions at {url}"
    table = Table(title=plain(title), title_justify="left")
    for name in ("session", "tenant", "does", "since", "turns", "waits for", "blocks in pool"):
        table.add_column(name, overflow="fold")
    for each in shown:
        table.add_row(
            plain(each["session"]), plain(each["tenant"] or "-"), plain(each["state"]),
            seconds(each["idle_s"]), str(each["turns"]), plain(each["waits_for"] or "-"),
            f"{each['pool']:,} of {each['blocks']:,}",
        )  # fmt: skip
    return table
