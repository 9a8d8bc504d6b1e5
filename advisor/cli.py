"""The command line. Only the module of the command in use is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from .. import __version__
from ..graph.errors import ConfigError, KvGraphError

COMMAND_GROUP: Final = "kvgraph.commands"

# Commands of the distribution `kvgraph-bench`, which is installed from a clone.
_OF_A_CLONE: Final = ("bench", "demo", "selftest")
_HOW_TO_GET: Final = "in a clone of the repository, run `make demo` or `pip install -e tests/bench`"

_OPERATE: Final = "Operate"
_ASK: Final = "Ask why"
_SERVE: Final = "Serve"
_LAB: Final = "Lab: try it on recorded traffic first"
_BUILD: Final = "Build and measure kvgraph"


class _Command(NamedTuple):
    panel: str
    place: str | None  # `module:name` below this package; None: an entry point
    help: str
    extra: str | None = None  # extra that its module needs; None: none


# In the order of `kvgraph --help`; a test compares the texts with those of the commands.
_COMMANDS: Final = {
    "serve": _Command(_OPERATE, "cli:serve", "Run a sidecar."),
    "status": _Command(_OPERATE, "tools.terminal:status",
        "Show the running sidecars: engines, blocks, sessions, what was lost."),
    "top": _Command(_OPERATE, "tools.top:top",
        "Show live whether kvgraph helps; Ctrl-C ends it. In a pipe, one look is printed."),
    "open": _Command(_OPERATE, "tools.terminal:open_page",
        "Print the page's address, with the token that opens it, and open it."),
    "keys": _Command(_OPERATE, "process.keys:keys",
        "Make CURVE keys, for engines and a sidecar that are on several machines."),
    "doctor": _Command(_OPERATE, None, "Check vLLM, the hooks, the environment and the sidecar."),
    "why": _Command(_ASK, "tools.terminal:why",
        "Say why a request, or a session's last one, found no more of its prompt in the cache."),
    "explain": _Command(_ASK, "tools.terminal:explain",
        "Say why a block ranks where it does, what a session does, or who recalls a memory."),
    "export": _Command(_ASK, "tools.export:export",
        "Write the graph that a sidecar or a snapshot holds, for other tools."),
    "route": _Command(_SERVE, "fleet.command:route",
        "One OpenAI-compatible address in front of several engines: sessions go where their KV is.",
        "route"),
    "memory": _Command(_SERVE, "memory.command:memory",
        "An OpenAI-compatible address at which chats outlive a token budget.", "memory"),
    "precache": _Command(_SERVE, "precache.keeper:precache",
        "Have stable prefixes computed before anybody asks, on any OpenAI-compatible server."),
    "calibrate": _Command(_SERVE, None, "Measure on your model what recall would cost.", "vllm"),
    "record": _Command(_LAB, "replay.cli:record",
        "Run a sidecar that also writes what its engines do, as a trace without texts or names."),
    "replay": _Command(_LAB, "replay.cli:replay",
        "Replay traces: what would each eviction policy have found in the cache?"),
    "plan": _Command(_LAB, "replay.plan:plan",
        "How many engines, how much host memory, which routing: hit rate and TTFT over cost."),
    "closed": _Command(_LAB, "replay.closed_arms:closed",
        "Play recorded agents who wait for answers: where does an engine collapse?"),
    "traffic": _Command(_LAB, "replay.fleet_traffic:traffic",
        "Lay recorded agent sessions over users: a fleet, as a trace for `kvgraph replay`."),
    "prior": _Command(_LAB, "replay.prior:prior",
        "Learn from recorded sessions when sessions return: where the lifecycle policy starts "
        "from."),
    "demo": _Command(_BUILD, None, "Run too many agents, simulated and on a real vLLM."),
    "bench": _Command(_BUILD, None, "Measure every figure that README and docs claim."),
    "selftest": _Command(_BUILD, None, "Check the kernels on this machine's GPU."),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an expected failure prints one line and sets the error's exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build_app(arguments[0] if arguments else None)(arguments, prog_name="kvgraph")
    except KvGraphError as error:
        typer.echo(f"kvgraph: {error}", err=True)
        sys.exit(error.exit_code)


def build_app(command: str | None) -> typer.Typer:
    """Build the command line, and import only ``command``'s part of it. Raises KvGraphError."""
    entries = {each.name: each for each in importlib.metadata.entry_points(group=COMMAND_GROUP)}
    absent = [name for name in _OF_A_CLONE if name not in entries]
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
    ours = {name: known for name, known in _COMMANDS.items() if known.place}
    for name in (*ours, *entries):
        known = _COMMANDS.get(name, _Command("Commands", None, f"See `kvgraph {name} --help`."))
        loaded = _load(name, known, entries.get(name)) if name == command else _unloaded(known)
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, rich_help_panel=known.panel)
        else:
            app.command(name, rich_help_panel=known.panel)(loaded)
    return app


def serve(
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where engines connect: ipc:///path or tcp://127.0.0.1:PORT; without it, a socket "
            "in the runtime directory."
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(help="Port of the page, 0 to 65535; without it, as with 0, a free one."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file, reread when it changes; without it, that of KVGRAPH_CONFIG."
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="A file that keeps the graph across restarts; without it, nothing does."),
    ] = None,
    parent: Annotated[
        int | None, typer.Option(help="Id of a process: exit when it is gone.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A key of the configuration: section.key=value; may be repeated."
        ),
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvgraph {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: allowed: section.key=value")
    return key.strip(), value.strip()


def _load(
    name: str, known: _Command, entry: importlib.metadata.EntryPoint | None
) -> typer.Typer | Callable[..., Any]:
    """Import a command; raises KvGraphError naming what to install when something is missing."""
    try:
        if known.place is not None:
            module, _, attribute = known.place.partition(":")
            found = getattr(importlib.import_module(f".{module}", __package__), attribute)
            assert callable(found), f"kvgraph {name} is no command"
            return found  # type: ignore[no-any-return]
        assert entry is not None
        loaded = entry.load()
    except ImportError as error:
        package = entry.dist.name if entry and entry.dist else "kvgraph"
        if known.extra:
            package += f"[{known.extra}]"
        how = _HOW_TO_GET if name in _OF_A_CLONE else f"pip install '{package}'"
        raise KvGraphError(f"`kvgraph {name}` cannot start ({error}): {how}") from None
    assert isinstance(loaded, typer.Typer), f"entry point {name} is not a typer app"
    only = loaded.registered_callback
    if only and only.callback and not (loaded.registered_commands or loaded.registered_groups):
        return only.callback  # mounted as a group, it would call a wrong argument a sub-command
    return loaded


def _unloaded(known: _Command) -> typer.Typer:
    """A placeholder in listings for a command that this call does not use."""
    stub = typer.Typer(help=known.help, add_completion=False)
    stub.callback(invoke_without_command=True)(lambda: None)
    return stub
