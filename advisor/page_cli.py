"""``kvgraph open`` and ``kvgraph why``: the page from a terminal."""

from __future__ import annotations

import contextlib
import html
import json
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

import typer

from ..dashboards.page_tokens import page_address
from ..graph.errors import ConfigError
from ..graph.ipc.runtime import runtime_dir
from .remote import RemoteError, UnknownError, ask, secret_of, sidecar_urls
from .terminal_tables import plain
from .times.spoken_times import seconds

UrlOption = Annotated[str | None, typer.Option(help="A sidecar's URL; without it, those running.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")]
_PREFIXES: Final = ("", "cmpl-", "chatcmpl-")  # before a client's X-Request-Id, by vLLM
_MOST: Final = 1_000  # requests of one answer; chosen
_LONGEST: Final = 256  # characters that can be searched for, by the API
_READ_WITHIN_S: Final = 10.0  # s that a browser has to start and read a file; chosen
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
            f"nobody knows the token of the sidecar at {url}: its runtime note is not this "
            "user's; set KVGRAPH_SIDECAR__TOKEN"
        )
    return page_address(url, secret, edit=edit)


def _show(addresses: Sequence[str]) -> None:
    """Open addresses in a browser; Ctrl-C ends the time that it has to read them.

    Every user of a machine can read a browser's command line, so it names files of ours alone.
    """
    with contextlib.ExitStack() as kept, contextlib.suppress(KeyboardInterrupt):
        files = [kept.enter_context(leading_to(each)) for each in addresses]
        opened = [webbrowser.open(each.as_uri()) for each in files]
        if any(opened):
            time.sleep(_READ_WITHIN_S)


@contextlib.contextmanager
def leading_to(address: str) -> Iterator[Path]:
    """A page (0600, in the runtime directory) that leads a browser on to ``address``; then gone.

    Raises:
        ConfigError: It cannot be written.
    """
    folder = runtime_dir()
    try:
        number, name = tempfile.mkstemp(prefix="open-", suffix=".html", dir=folder)
    except OSError as error:
        raise ConfigError(f"runtime directory {str(folder)!r}: {error.strerror}") from None
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
    last: Annotated[int, typer.Option(min=1, help="How many of its requests.")] = 1,
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
    """Requests of this id, or else of this session, each with the sidecar that knows it."""
    asked = f"/v1/requests?limit={_MOST}&search={quote(target[:_LONGEST], safe='')}"
    for url in urls:
        for request in matching(ask(url, asked)["requests"], target):
            yield url, request


def matching(requests: Sequence[Mapping[str, Any]], target: str) -> list[Mapping[str, Any]]:
    """Requests of this id, or else of this session.

    An engine calls a request ``ID-0-1f3a5b7c`` whose client got the answer ``ID``: the place of the
    prompt and a random part are vLLM's own. ``ID`` is ``chatcmpl-NAME`` where the client's
    ``X-Request-Id`` is ``NAME``.
    """
    own = [each for each in requests if each["request"] == target]
    own = own or [each for each in requests if _is_of(each["request"], target)]
    return own or [each for each in requests if each["session"] == target]


def _is_of(request: str, target: str) -> bool:
    """Whether a request has this id, or is the one that its client calls so."""
    names = [prefix + target for prefix in _PREFIXES]
    return request in names or request.startswith(tuple(f"{name}-" for name in names))


def _why_held(url: str, session: str) -> Sequence[str]:
    """Why the next request of this session has not begun; empty where no session waits."""
    try:
        facts = ask(url, f"/sessions/{quote(session, safe='')}/explain")
    except UnknownError:
        return ()
    return cast(Sequence[str], facts.get("why", ()))


def held_sentence(held: Mapping[str, Any]) -> str:
    """Why a request, or the next one of a session, has not begun: one sentence."""
    if "session" in held:
        return f"The next request of session {held['session']} has not begun: {held['why']}."
    return (
        f"Request {held['request']} has not begun: most of its context is not in the pool, and "
        f"for {seconds(held['held_s'])} it has waited for room; kvgraph status says how many "
        "sessions fit."
    )


def why_sentence(request: Mapping[str, Any]) -> str:
    """What a request found, why no more, and what would have made it faster."""
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
    """What a remedy is worth, after "what would have"."""
    return f"saved up to {seconds(remedy['saves_s'])}" if remedy["saves_s"] else "helped"


def _took(request: Mapping[str, Any]) -> Iterator[str]:
    """From its arrival to its end, and how much of that it waited; of one that runs: how long it
    waited."""
    waited, ended = request["waited_s"], request["ended_at"]
    if ended is not None:
        queued = f", {seconds(waited)} of it in the queue" if request["wait"] else ""
        yield f"It took {seconds(waited + max(0.0, ended - request['at']))}{queued}."
    elif request["wait"]:
        yield f"It waited {seconds(waited)}."
