"""`kvgraph doctor`: checks vLLM, the plugin, the sockets and the sidecar, and names the remedy."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.client import HTTPException
from typing import Annotated, Final

import typer
import zmq

from ...graph.errors import ConfigError, VersionError, WireError
from ...graph.wire import frames as wire
from ...graph.wire.endpoints import RunningSidecar, running_sidecars
from ...graph.wire.events import REMEDY, BlockHashing, Pressure, disagreements
from ..access import EndpointAccess, answer_of
from ..settings import (
    PLUGIN_GROUP,
    SIDECAR_VARIABLE,
    WARM_VARIABLE,
    engine_settings,
)
from ..sidecar import SocketDirectory
from ..vllm.patching import PATCHES
from ..vllm.plugin import rival_plugins
from ..vllm.relied_on import RELIED_ON, SET, Part
from ..vllm.versions import (
    TESTED,
    WHAT_FITS,
    is_known,
    is_tested,
    live_misfits,
    live_unknown_places,
)
from .environment import (
    CORRECT,
    NAME,
    Check,
    check_admission,
    check_compiled,
    check_ends,
    check_frontend,
    check_hints,
    check_layers,
    check_protection,
    check_recall,
    check_sampling,
    check_store,
    check_switch,
    check_tiers,
    check_variables,
    recall_of,
)
from .gpu_check import check_gpu


def check_hashing() -> Check:
    told = [e for sidecar in running_sidecars() for e in hashing_at(sidecar) if e.told]
    if not told:
        return Check("block hashes", None, "no running engine says how it hashes blocks")
    if wrong := disagreements(told):
        return Check("block hashes", True, " ".join(wrong), REMEDY)
    kinds = "; ".join(sorted({each.told for each in told}))
    return Check("block hashes", True, f"engines of one model hash them alike: {kinds}")


def hashing_at(sidecar: RunningSidecar) -> list[BlockHashing]:
    """Return how a sidecar's engines hash blocks; empty if it does not answer."""
    try:
        engines = answer_of(sidecar, "/status")["engines"]
        return [BlockHashing(each["name"], each["model"], each["hashing"]) for each in engines]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return []


app = typer.Typer(add_completion=False)

_INSTALL: Final = "pip install 'kvgraph[vllm]' (GPU) or 'kvgraph[cpu]'"
_NEW: Final = f"install vLLM {TESTED}.x if an engine stands aside or answers oddly"
_NO_COMMAND: Final = (
    "looks for a package called vllm, which this build does not have; start engines with "
    "`python -m vllm.entrypoints.openai.api_server --model …`"
)
_FOR_CUDA: Final = ("torchvision", "torchaudio", "torchcodec")
_NO_CUDA_BUILDS: Final = (
    f"it does not fit this torch; beside one for CPUs, pip uninstall {' '.join(_FOR_CUDA)}: "
    "PyPI's builds are for CUDA and break vLLM's import"
)
_ASKS: Final = "there it may run otherwise than stock vLLM; report them"
_COMPILE: Final = "install a C++ compiler and kvgraph again; an engine's step gets cheaper by it"
_NOT_FITTING: Final = f"install vLLM {TESTED}.x, or report the missing name"


@app.callback(invoke_without_command=True)
def doctor(
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="The sidecar to reach, e.g. tcp://127.0.0.1:5560; without it, that of "
            "AITHER_KVCACHE_SIDECAR."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What `vllm serve` will be given, as one word: 'MODEL --option …': says what "
            "kvgraph can do for such an engine."
        ),
    ] = None,
) -> None:
    """Check vLLM, the hooks, the switch and the sockets; exit 1 if anything is wrong."""
    checks = list(run_checks(endpoint or engine_settings().sidecar or None))
    if engine is not None:
        checks.append(_check("engine", lambda: check_engine(engine)))
    failed = any(check.ok is False for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}))
    else:
        for check in checks:
            typer.echo(check.line())
    raise typer.Exit(1 if failed else 0)


def run_checks(endpoint: str | None) -> Iterator[Check]:
    installed = _check("vllm", check_vllm)
    yield installed
    if installed.ok:
        yield _check("vllm serve", check_start)
        yield _check("hooks", check_hooks)
        yield _check("patches", check_patches)
        yield _check("conditions", check_conditions)
        yield _check("core", check_core)
    yield _check("plugin", check_plugin)
    yield _check("switch", check_switch)
    yield _check("variables", check_variables)
    yield _check("hints", check_hints)
    yield _check("frontend", check_frontend)
    yield _check("layers", check_layers)
    yield _check("ends", check_ends)
    yield _check("admission", check_admission)
    yield _check("protection", check_protection)
    yield _check("tiers", check_tiers)
    yield _check("shared store", check_store)
    yield _check("recall", check_recall)
    yield _check("sampling", check_sampling)
    yield _check("gpu", check_gpu)
    yield _check("ipc socket", check_ipc)
    yield _check(NAME, check_compiled)
    yield _check("sidecar", lambda: check_sidecar(endpoint))
    yield _check("block hashes", check_hashing)


def _check(name: str, ask: Callable[[], Check]) -> Check:
    try:
        return ask()
    except Exception as error:
        misfit = any(package in str(error) for package in _FOR_CUDA)
        remedy = _NO_CUDA_BUILDS if misfit else "see the error"
        return Check(name, False, f"{type(error).__name__}: {error}", remedy)


def check_vllm() -> Check:
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        return Check("vllm", False, f"cannot be imported ({error})", _INSTALL)
    version = vllm.__version__
    if is_tested(version):
        return Check("vllm", True, f"version {version}; {WHAT_FITS}")
    if is_known(version):
        detail = f"version {version}, of which names and parameters were compared; {WHAT_FITS}"
        return Check("vllm", True, detail)
    return Check("vllm", True, f"version {version} was not looked through; {WHAT_FITS}", _NEW)


def check_start() -> Check:
    """Check that `vllm serve` finds its package, which has another name in the CPU build."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Check("vllm serve", None, _NO_COMMAND)
    return Check("vllm serve", True, "finds its package")


def check_hooks() -> Check:
    if problems := live_misfits():
        return Check("hooks", False, "; ".join(problems), _NOT_FITTING)
    for part in (Part.TIERS, Part.ADMISSION, Part.ENDS, Part.WAKING):
        if problems := live_misfits(part):
            detail = f"no {part.value} with this vLLM: {'; '.join(problems)}"
            return Check("hooks", True, detail, _NOT_FITTING)
    return Check("hooks", True, f"all {len(RELIED_ON)} names that we rely on fit")


def check_patches() -> Check:
    return Check("patches", True, f"switched on, we follow {', '.join(PATCHES)}")


def check_conditions() -> Check:
    if places := live_unknown_places():
        detail = f"vLLM asks whether there is a KV connector in unknown places: {', '.join(places)}"
        return Check("conditions", True, detail, _ASKS)
    return Check("conditions", True, f"what vLLM does with a {SET} is known")


def check_core() -> Check:
    from ..vllm.core_choice import reason_against

    settings = engine_settings()
    if complaint := settings.complaint("core"):
        return Check("core", False, f"{complaint}; without it, the compiled core runs", CORRECT)
    if (reason := reason_against()) is None:
        return Check("core", True, "compiled; agrees with the Python path on a scratch pool")
    if settings.core:
        return Check("core", None, f"the hooks run in Python: {reason}")
    return Check("core", True, f"the hooks run in Python: {reason}", _COMPILE)


def check_engine(arguments: str) -> Check:
    """Check that an engine started with ``arguments`` can be advised, and can have tiers."""
    from ..vllm.shapes import (
        engine_config,
        reason_for_no_samples,
        reason_for_no_tiers,
        reason_to_decline,
        sizing,
    )

    said = io.StringIO()  # by vLLM's parser, before it exits with a number
    try:
        with contextlib.redirect_stderr(said):
            config = engine_config(shlex.split(arguments))
    except (Exception, SystemExit) as error:
        why = _complaint(said.getvalue()) if isinstance(error, SystemExit) else str(error)
        detail = f"vLLM does not take these arguments: {why or error}"
        return Check("engine", False, detail, "try them with `vllm serve`")
    if reason := reason_to_decline(config):
        return Check("engine", False, f"runs without us: {reason}", "see docs/engines.md")
    unseen = reason_for_no_samples(config) if engine_settings().sampling else None
    sampled = f"; no sampling: {unseen}" if unseen else ""
    if reason := reason_for_no_tiers(config):
        return Check("engine", True, f"advised; no tiers: {reason}{sampled}")
    detail = f"advised; tiers where {WARM_VARIABLE} asks for them; {sizing(config)}{sampled}"
    detail += recall_of(config)
    return Check("engine", True, detail)


def check_plugin() -> Check:
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


def check_ipc() -> Check:
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
    if endpoint is None:
        return Check("sidecar", None, f"{SIDECAR_VARIABLE} is not set: an engine starts its own")
    remedy = f"start one: kvgraph serve --endpoint {endpoint}"
    try:
        frames = _ask(endpoint, timeout_s)
    except zmq.ZMQError as error:
        return Check("sidecar", False, f"{endpoint}: {error}", "use ipc://PATH or tcp://HOST:PORT")
    except ConfigError as error:
        return Check("sidecar", False, str(error), "correct the variable, or unset it")
    if frames is None:
        return Check("sidecar", False, f"nobody answers at {endpoint}", remedy)
    try:
        wire.decode_advice(frames, 0.0)
    except VersionError as error:
        return Check("sidecar", False, str(error), "use one kvgraph version on both sides")
    except WireError as error:
        return Check("sidecar", False, f"{endpoint} is not a sidecar: {error}", remedy)
    return Check("sidecar", True, f"answers at {endpoint}")


def _ask(endpoint: str, timeout_s: float) -> list[bytes] | None:
    """Send a message as an unknown engine: a sidecar asks who that is."""
    patience_ms, access = round(timeout_s * 1000), EndpointAccess(endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, patience_ms)
        socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        access.present(socket)
        socket.connect(endpoint)
        try:
            socket.send_multipart(wire.encode_events(0, [Pressure(0, 0, 0, 0, 0)]))
        except zmq.Again:  # where the token was refused, sending blocks too
            return None
        if not socket.poll(patience_ms, zmq.POLLIN):
            return None
        return socket.recv_multipart()


def _complaint(said: str) -> str:
    """A parser's message: the last line of what it prints, without its name."""
    last = said.strip().rpartition("\n")[2]
    return last.partition("error: ")[2] or last
