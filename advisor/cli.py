"""The command line. Commands that need more than the sidecar are found by entry point."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from .. import __version__
from ..dashboards.access import page_address
from ..graph.errors import ConfigError, KvGraphError
from .fleet.command import route
from .memory.command import memory
from .precache.keeper import precache
from .process.keys import keys
from .replay.cli import record, replay, tune
from .replay.closed_arms import closed
from .replay.fleet_traffic import traffic
from .replay.plan import plan
from .replay.prior import prior
from .tools.diff import diff
from .tools.export import export
from .tools.remote import ask, secret_of, sidecar_urls
from .tools.terminal import ExplainJsonOption as JsonOption
from .tools.terminal import explain, hashing_warnings, open_page, status_report, why
from .tools.top import top

COMMAND_GROUP: Final = "kvgraph.commands"

# Commands of the distribution `kvgraph-bench`, which is installed from a clone.
_OF_A_CLONE: Final = ("bench", "demo", "selftest")
_HOW_TO_GET: Final = "in a clone of the repository, run `make demo` or `pip install -e tests/bench`"
_EXTRAS: Final = {"calibrate": "vllm"}  # commands of ours that need more than `kvgraph` brings

# What people do, in the order in which `kvgraph --help` lists it.
_OPERATE: Final = "Operate"
_ASK: Final = "Ask why"
_SERVE: Final = "Serve"
_LAB: Final = "Lab: ask first what it would buy"
_BUILD: Final = "Build and measure kvgraph"
# Commands of entry points: where they are listed and what they do, known before they are imported.
_ELSEWHERE: Final = {
    "doctor": (_OPERATE, "Check vLLM, the hooks, the environment and the sidecar."),
    "calibrate": (_SERVE, "Measure on your model what recall would cost."),
    "demo": (_BUILD, "Run too many agents, simulated and on a real vLLM."),
    "bench": (_BUILD, "Measure every figure that README and docs claim."),
    "selftest": (_BUILD, "Check the kernels on this machine's GPU."),
}

UrlOption = Annotated[str | None, typer.Option(help="A sidecar's URL; without it, those running.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; expected failures end in one line and exit code 1."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build_app(arguments[0] if arguments else None)(arguments, prog_name="kvgraph")
    except KvGraphError as error:
        typer.echo(f"kvgraph: {error}", err=True)
        sys.exit(1)


def build_app(command: str | None) -> typer.Typer:
    """The commands of this folder, and those of entry points; only ``command`` is imported.

    Raises:
        KvGraphError: ``command`` lacks what it needs, or is one of a clone and not installed.
    """
    entries = importlib.metadata.entry_points(group=COMMAND_GROUP)
    absent = [each for each in _OF_A_CLONE if each not in {entry.name for entry in entries}]
    if command in absent:
        raise KvGraphError(f"`kvgraph {command}` is not installed: {_HOW_TO_GET}")
    app = typer.Typer(
        help="A graph-backed KV cache advisor for LLM engines.",
        epilog=f"Not installed: {', '.join(absent)}; {_HOW_TO_GET}." if absent else None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for panel, functions in (
        (_OPERATE, (serve, status, top)),
        (_ASK, (why, explain, diff, export)),
        (_SERVE, (route, memory, precache)),
        (_LAB, (record, replay, tune, plan, closed, traffic, prior)),
    ):
        for function in functions:
            app.command(rich_help_panel=panel)(function)
    app.command("open", rich_help_panel=_OPERATE)(open_page)
    app.add_typer(keys, name="keys", rich_help_panel=_OPERATE)
    for entry in entries:
        loaded = _load(entry) if entry.name == command else _unloaded(entry.name)
        known = _ELSEWHERE.get(entry.name)
        app.add_typer(loaded, name=entry.name, rich_help_panel=known[0] if known else None)
    return app


def serve(
    endpoint: Annotated[
        str | None, typer.Option(help="ipc:///path or tcp://127.0.0.1:PORT.")
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="0 picks a free port.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file, reread when it changes.")
    ] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Where to keep the graph on disk.")] = None,
    parent: Annotated[int | None, typer.Option(help="Exit when this process is gone.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, repeatable.")
    ] = None,
) -> None:
    """Run a sidecar."""
    from .service import serve as run  # the other commands need none of what this imports

    overrides: dict[str, Any] = dict(map(_assignment, setting or []))
    given = {
        "sidecar.endpoint": endpoint,
        "http.port": http_port,
        "sidecar.snapshot_path": snapshot,
    }
    overrides |= {key: value for key, value in given.items() if value is not None}
    run(config, overrides, parent)


def status(url: UrlOption = None, as_json: JsonOption = False) -> None:
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvgraph {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print it.")
    ] = False,
) -> None:
    pass


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: allowed: section.key=value")
    return key.strip(), value.strip()


def _load(entry: importlib.metadata.EntryPoint) -> typer.Typer:
    """A command's app; raises KvGraphError naming what to install when something is missing."""
    try:
        loaded = entry.load()
    except ImportError as error:
        package = entry.dist.name if entry.dist else "kvgraph"
        if extra := _EXTRAS.get(entry.name):
            package += f"[{extra}]"
        how = _HOW_TO_GET if entry.name in _OF_A_CLONE else f"pip install '{package}'"
        raise KvGraphError(f"`kvgraph {entry.name}` cannot start ({error}): {how}") from None
    assert isinstance(loaded, typer.Typer), f"entry point {entry.name} is not a typer app"
    return loaded


def _unloaded(name: str) -> typer.Typer:
    """A placeholder in listings for a command that this call does not use."""
    known = _ELSEWHERE.get(name)
    said = known[1] if known else f"See `kvgraph {name} --help`."
    stub = typer.Typer(help=said, add_completion=False)
    stub.callback(invoke_without_command=True)(lambda: None)
    return stub
