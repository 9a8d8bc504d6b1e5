"""``kvgraph doctor``: what stands between this machine and an advised engine, with the remedy."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
import zmq

from ..graph.errors import ConfigError, VersionError, WireError
from ..graph.messages import wire
from ..graph.messages.events import Pressure
from .access import present, sidecar_token
from .reliance import HOOKS, misfits
from .socket_directory import SocketDirectory
from .tiers.budget import (
    COLD_VARIABLE,
    DIRECTORY_VARIABLE,
    DISK_SUFFIX,
    WARM_VARIABLE,
    read_settings,
)
from .tiers.host_memory import available_bytes
from .vllm.plugin import rival_plugins
from .vllm.settings import (
    PLUGIN_GROUP,
    SIDECAR_VARIABLE,
    SWITCH_VARIABLE,
    TESTED_VERSION,
    switched_on,
)

app = typer.Typer(add_completion=False)

_INSTALL: Final = "pip install 'kvgraph[vllm]' (GPU) or 'kvgraph[cpu]'"
_NOT_FITTING: Final = f"install vLLM {TESTED_VERSION}.x, or report the missing name"


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: ``ok`` is None where the question does not arise."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


@app.callback(invoke_without_command=True)
def doctor(
    endpoint: Annotated[
        str | None, typer.Option(help="The sidecar to reach, e.g. tcp://127.0.0.1:5560.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="What `vllm serve` will be given: can such an engine do it?")
    ] = None,
) -> None:
    """Check vLLM, the hooks, the switch and the sockets; exit 1 if anything is wrong."""
    checks = list(run_checks(endpoint or os.environ.get(SIDECAR_VARIABLE)))
    if engine is not None:
        checks.append(_check("engine", lambda: check_engine(engine)))
    failed = any(check.ok is False for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}))
    else:
        for check in checks:
            typer.echo(_line(check))
    raise typer.Exit(1 if failed else 0)


def run_checks(endpoint: str | None) -> Iterator[Check]:
    """Every check, in the order in which a person would ask."""
    installed = _check("vllm", check_vllm)
    yield installed
    if installed.ok:
        yield _check("hooks", check_hooks)
    yield _check("plugin", check_plugin)
    yield _check("switch", check_switch)
    yield _check("tiers", check_tiers)
    yield _check("ipc socket", check_ipc)
    yield _check("sidecar", lambda: check_sidecar(endpoint))


def _check(name: str, ask: Callable[[], Check]) -> Check:
    try:
        return ask()
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}", "see the error")


def _line(check: Check) -> str:
    mark = {True: "ok  ", False: "FAIL", None: "–   "}[check.ok]
    remedy = f"\n       → {check.remedy}" if check.ok is False and check.remedy else ""
    return f"{mark} {check.name}: {check.detail}{remedy}"


def check_vllm() -> Check:
    """Is vLLM there, and which."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        return Check("vllm", False, f"cannot be imported ({error})", _INSTALL)
    tested = vllm.__version__.startswith(TESTED_VERSION + ".")
    note = "" if tested else f", untested: kvgraph is tested with {TESTED_VERSION}.x"
    return Check("vllm", True, f"version {vllm.__version__}{note}")


def check_hooks() -> Check:
    """Does everything of vLLM's that the hooks rely on exist, with the parameters they use."""
    if problems := misfits():
        return Check("hooks", False, "; ".join(problems), _NOT_FITTING)
    return Check("hooks", True, f"all {len(HOOKS)} that we rely on fit")


def check_engine(arguments: str) -> Check:
    """Is an engine that is started with ``arguments`` advised, and can it have tiers."""
    from .vllm.shapes import engine_config, reason_for_no_tiers, reason_to_decline

    try:
        config = engine_config(shlex.split(arguments))
    except (Exception, SystemExit) as error:
        detail = f"vLLM does not take these arguments: {error}"
        return Check("engine", False, detail, "try them with `vllm serve`")
    if reason := reason_to_decline(config):
        return Check("engine", False, f"runs without us: {reason}", "see README, Which engines")
    if reason := reason_for_no_tiers(config):
        return Check("engine", True, f"advised; no tiers: {reason}")
    return Check("engine", True, f"advised; tiers where {WARM_VARIABLE} asks for them")


def check_plugin() -> Check:
    """Will vLLM load the plugin."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if "kvgraph" not in names:
        return Check("plugin", False, "its entry point is not visible", "pip install kvgraph again")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvgraph" not in allowed.split(","):
        remedy = "add kvgraph to VLLM_PLUGINS, or unset it"
        return Check("plugin", False, f"VLLM_PLUGINS={allowed} leaves it out", remedy)
    if rivals := rival_plugins():
        remedy = "set VLLM_PLUGINS=kvgraph (and whatever other plugins you need)"
        return Check("plugin", False, f"{', '.join(rivals)} answers to the same switch", remedy)
    return Check("plugin", True, "vLLM will load it")


def check_switch() -> Check:
    """Is the feature switched on in this environment."""
    if switched_on():
        return Check("switch", True, f"{SWITCH_VARIABLE} is set")
    return Check("switch", None, f"off; engines start stock until {SWITCH_VARIABLE}=1 is set")


def check_tiers() -> Check:
    """Can blocks that leave the engine's pool be kept, as the environment asks."""
    try:
        tiers = read_settings(os.environ)
    except ConfigError as error:
        return Check("tiers", False, str(error), "correct the variable, or unset it")
    if tiers is None:
        return Check("tiers", None, f"off; {WARM_VARIABLE}=GiB keeps evicted blocks in host memory")
    free = available_bytes()
    if tiers.warm_bytes > free:
        detail = f"{_gib(tiers.warm_bytes)} GiB of host memory asked for, {_gib(free)} GiB are free"
        return Check("tiers", False, detail, f"lower {WARM_VARIABLE}")
    if tiers.cold_dir is not None and (problem := _disk_problem(tiers.cold_dir, tiers.cold_bytes)):
        return Check("tiers", False, problem, f"change {DIRECTORY_VARIABLE} or {COLD_VARIABLE}")
    disk = f", {_gib(tiers.cold_bytes)} GiB in {tiers.cold_dir}" if tiers.cold_dir else ""
    return Check("tiers", True, f"{_gib(tiers.warm_bytes)} GiB of host memory a worker{disk}")


def _disk_problem(directory: Path, wanted: int) -> str | None:
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        return f"{nearest} cannot be written"
    present = sum(file.stat().st_size for file in directory.glob(f"*{DISK_SUFFIX}"))
    free = shutil.disk_usage(nearest).free + present  # our own files are there already
    return f"{nearest} has {_gib(free)} GiB free of {_gib(wanted)}" if free < wanted else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def check_ipc() -> Check:
    """Can a private ipc socket be made."""
    sockets = SocketDirectory()
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(f"ipc://{sockets.path}/doctor.sock")
    except zmq.ZMQError as error:
        return Check("ipc socket", False, str(error), "point TMPDIR at a writable local directory")
    finally:
        sockets.close()
    return Check("ipc socket", True, "can be created")


def check_sidecar(endpoint: str | None, timeout_s: float = 2.0) -> Check:
    """Does a sidecar answer at ``endpoint``."""
    if endpoint is None:
        return Check("sidecar", None, f"{SIDECAR_VARIABLE} is not set: an engine starts its own")
    remedy = f"start one: kvgraph serve --endpoint {endpoint}"
    try:
        frames = _ask(endpoint, timeout_s)
    except zmq.ZMQError as error:
        return Check("sidecar", False, f"{endpoint}: {error}", "use ipc://PATH or tcp://HOST:PORT")
    if frames is None:
        return Check("sidecar", False, f"nobody answers at {endpoint}", remedy)
    try:
        wire.decode_advice(frames)
    except VersionError as error:
        return Check("sidecar", False, str(error), "use one kvgraph version on both sides")
    except WireError as error:
        return Check("sidecar", False, f"{endpoint} is not a sidecar: {error}", remedy)
    return Check("sidecar", True, f"answers at {endpoint}")


def _ask(endpoint: str, timeout_s: float) -> list[bytes] | None:
    """Speak up as an engine that the sidecar does not know: it asks who that is."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        present(socket, sidecar_token(endpoint))
        socket.connect(endpoint)
        socket.send_multipart(wire.encode_events(0, [Pressure(0, 0, 0, 0, 0)]))
        if not socket.poll(round(timeout_s * 1000), zmq.POLLIN):
            return None
        return socket.recv_multipart()
