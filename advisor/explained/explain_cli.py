"""``kvgraph explain``: what the graph believes of a block, a session or a memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from ..page_cli import UrlOption, requests_of
from ..remote import RemoteError, UnknownError, ask, sidecar_urls
from ..terminal import facts_report
from ..terminal_tables import plain
from ..times.spoken_times import seconds

# A block's key, or the beginning of one.
_HEXADECIMAL: Final = re.compile(r"(0x)?[0-9a-f]+(…|\.\.\.)?", re.IGNORECASE)
_WHOLE_KEY: Final = (
    "a block is named by its whole key: a decimal number, or 0x and up to 16 hexadecimal digits"
)
_MEMORY: Final = "memory:"
_LISTED: Final = 20  # sessions; chosen, to fit a screen


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A block (decimal or 0x…), a session, the id of a request, or memory:ID; without "
            "one, the sessions are listed."
        ),
    ] = None,
    url: UrlOption = None,
    tenant: Annotated[str | None, typer.Option(help="Whose session it is.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a block ranks where it does, what a session does, or who recalls a memory."""
    urls = sidecar_urls(url)
    if target is None:
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
    """Where to ask about ``target``: as a memory if it is called one, as a block if it is a
    block's key, then as a session."""
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
    """The sessions that a sidecar heard of last."""
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
