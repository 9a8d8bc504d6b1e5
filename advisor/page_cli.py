"""``kvgraph open`` and ``kvgraph why``: the page from a terminal."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from ..dashboards.page_tokens import page_address
from .page.miss_words import seconds
from .remote import RemoteError, UnknownError, ask, secret_of, sidecar_urls
from .terminal_tables import plain

UrlOption = Annotated[str | None, typer.Option(help="A sidecar's URL; without it, those running.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")]
_RECENT: Final = 1_000  # requests that are searched; chosen


def open_page(
    url: UrlOption = None,
    edit: Annotated[bool, typer.Option("--edit", help="Let the page change weights.")] = False,
    browser: Annotated[bool, typer.Option(help="Open it in a browser too.")] = True,
) -> None:
    """Print the page's address, with the token that opens it, and open it."""
    for each in sidecar_urls(url):
        secret = secret_of(each)
        if not secret:
            raise RemoteError(
                f"nobody knows the token of the sidecar at {each}: its runtime note is not this "
                "user's; set KVGRAPH_SIDECAR__TOKEN"
            )
        address = page_address(each, secret, edit=edit)
        typer.echo(address)
        if browser:
            webbrowser.open(address)


def why(
    target: Annotated[str, typer.Argument(help="A request's id, or a session's name.")],
    url: UrlOption = None,
    last: Annotated[int, typer.Option(min=1, help="How many of its requests.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Say why a request, or a session's last one, found no more of its prompt in the cache."""
    found: list[Mapping[str, Any]] = []
    for each in sidecar_urls(url):
        found += _matching(ask(each, f"/v1/requests?limit={_RECENT}"), target)
    if not found:
        raise UnknownError(
            f"no request or session {target!r} is among the last {_RECENT:,} requests"
        )
    newest = sorted(found, key=lambda request: -request["at"])[:last]
    if as_json:
        typer.echo(json.dumps(newest))
        return
    for request in newest:
        typer.echo(plain(why_sentence(request)).plain)


def _matching(answer: Mapping[str, Any], target: str) -> list[Mapping[str, Any]]:
    """Requests of this id, or else of this session, the newest first."""
    requests: Sequence[Mapping[str, Any]] = answer["requests"]
    exact = [each for each in requests if each["request"] == target]
    return exact or [each for each in requests if each["session"] == target]


def why_sentence(request: Mapping[str, Any]) -> str:
    """What a request found, and why no more: two sentences."""
    blocks, miss = request["blocks"], request["miss"]
    parts = [f"{blocks['pool']} in the pool"]
    parts += [f"{blocks[name]} {name}" for name in ("loaded", "prefetched") if blocks[name]]
    session = f" of session {request['session']}" if request["session"] else ""
    head = (
        f"Request {request['request']}{session}: {request['prompt_tokens']:,} tokens, "
        f"{blocks['asked']} blocks; {', '.join(parts)}, {blocks['computed']} computed."
    )
    wait = request["ended_at"]
    took = f" It took {seconds(wait - request['at'])}." if wait is not None else ""
    return f"{head}{took} {miss['sentence'] if miss else ''}".rstrip()
