"""``kvgraph bench …`` and ``kvgraph demo``; each bench is imported only when it is run."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.console import Console

from .errors import BenchError

if TYPE_CHECKING:
    from .agents.agents_arms import AgentArm
    from .demo.demo import DemoRun
    from .figures import Figures

app = typer.Typer(no_args_is_help=True, help="Measure every figure that README and docs claim.")
demo_app = typer.Typer()


def _check_part(part: str, parts: Iterable[str]) -> None:
    if part not in tuple(parts):
        raise typer.BadParameter(f"{part!r}; allowed: {', '.join(parts)}", param_hint="--part")


def _measure(bench: str, as_json: bool, **options: Any) -> Figures:
    with _explained():
        module = importlib.import_module(bench, __package__)
        if "part" in options:
            _check_part(options["part"], module.PARTS)
        figures: Figures = module.run(progress=not as_json, **options)
    figures.print(as_json)
    return figures


def _writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    return path


Quick = Annotated[bool, typer.Option("--quick", help="A short version: no claims.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")]
Raw = Annotated[
    Path | None, typer.Option(callback=_writable, help="Save all that is measured here, as JSON.")
]
Model = Annotated[
    str | None,
    typer.Option(help="Any model that vLLM loads; without it, a small random Llama is written."),
]
Part = Annotated[
    str,
    typer.Option(
        help="all; cliff: simulated; engine: the cliff on a real one; found: what is found, by a "
        "simulated clock; page: to watch, until Ctrl-C; fleet: "
        "three engines behind a router."
    ),
]
Out = Annotated[Path, typer.Option(help="Where the picture, the figures and the logs go.")]

Arms = Annotated[
    str | None,
    typer.Option(
        help="Besides stock: default,marked,hints,host_lru,quiet_tiers,tiers; with --closed: lpm,"
        "off,hold,hold_told,host_lru,host_hold."
    ),
]
Sessions = Annotated[
    Path | None, typer.Option(help="Recorded sessions (Weka); else those that ship with it.")
]
Requests = Annotated[
    int | None, typer.Option(min=50, help="Requests played; else 400, --open 600.")
]
Stock = Annotated[
    str | None,
    typer.Option(help="Shares that stock should find, a pool each; else .6,.4,.8, quick .6."),
]
Closed = Annotated[
    bool, typer.Option("--closed", help="Users wait for answers: the cliff, and admission.")
]
Paper = Annotated[
    bool, typer.Option("--paper", help="--closed: vLLM's scheduler, a simulated model.")
]
Open = Annotated[
    bool, typer.Option("--open", help="Requests come by the clock; the same simulated model.")
]
Best = Annotated[
    int | None, typer.Option(min=1, help="--closed: agents that suit stock; else searched.")
]

Pairs = Annotated[
    int | None, typer.Option(min=1, help="--closed: runs below the cliff; else 3, quick 1.")
]

DEFAULT_OUT = Path(".demo")


@app.command()
def graph(as_json: Json = False) -> None:
    """Measure ranking time, memory, ingest rate and idle load of the graph. Two minutes on idle
    cores.
    """
    _measure(".graph.graph", as_json)


@app.command()
def sidecar(as_json: Json = False) -> None:
    """What a sidecar uses of a core and of memory, and how old its advice is: one engine, and 64.
    Two minutes on idle cores.
    """
    _measure(".sidecars.sidecar_bench", as_json)


@app.command()
def hotpath(
    as_json: Json = False,
    part: Annotated[
        str,
        typer.Option(help="all; pool: without a scheduler; client: its thread; steps: vLLM's own."),
    ] = "all",
) -> None:
    """Measure what the engine pays: reading advice, applying it, observing a step. Ten minutes on
    idle cores; both cores of the hooks side by side.
    """
    _measure(".hotpath", as_json, part=part)


@app.command()
def engine(
    as_json: Json = False,
    quick: Quick = False,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Rounds between two starts of all servers.")
    ] = None,
    part: Annotated[
        str, typer.Option(help="all (engine and sidecar), engine, sidecar, profile.")
    ] = "all",
    raw: Raw = None,
    model: Model = None,
) -> None:
    """Run a real vLLM without memory pressure, on and off in turn: CPU time, throughput. Fifteen
    minutes; profile: four. What was measured is kept as it comes (--raw), after Ctrl-C too.
    """
    figures = _measure(
        ".engine.engine", as_json, quick=quick, pairs=pairs, model=model, raw=raw, part=part
    )
    if not figures.figures["complete"].value:
        raise typer.Exit(1)


@app.command()
def replay(
    as_json: Json = False,
    trace: Annotated[Path | None, typer.Option(help="A trace file, instead of the fleet.")] = None,
) -> None:
    """Measure the replay lab's speed: six policies over three hours of 40 users."""
    _measure(".replay", as_json, trace=trace)


@app.command()
def meaning(
    as_json: Json = False,
    quick: Quick = False,
    seed: int = 1,
    part: Annotated[str, typer.Option(help="all, cost, sampling or engine.")] = "all",
) -> None:
    """What understanding plain traffic costs, and what a real engine keeps by it."""
    _measure(".meaning.meaning", as_json, quick=quick, seed=seed, part=part)


@app.command()
def confkv(
    as_json: Json = False,
    quick: Quick = False,
    model: Annotated[
        Path | None,
        typer.Option(help="A model's folder or GGUF file; else the one that ships with the bench."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file or folder; else held-out documents that ship.")
    ] = None,
    texts: Annotated[int | None, typer.Option(min=3, help="Windows of text; else 48.")] = None,
    length: Annotated[
        int | None, typer.Option(min=256, help="Tokens of a window; else 1,024.")
    ] = None,
    part: Annotated[str, typer.Option(help="all, text, needles, pages or cost.")] = "all",
) -> None:
    """Read text with caches that forget: by confidence, and the rivals at the same memory."""
    with _explained():
        from .confkv.confkv import FULL, QUICK

        scale = QUICK if quick else FULL
        scale = replace(scale, texts=texts or scale.texts, length=length or scale.length)
    _measure(".confkv.confkv", as_json, part=part, scale=scale, model=model, text=text)


@app.command()
def fleet(
    as_json: Json = False,
    quick: Quick = False,
    raw: Raw = None,
    part: Annotated[
        str, typer.Option(help="all, latency, stock; store, kills, routers: on real engines.")
    ] = "all",
) -> None:
    """Many engines: what the router finds and costs, a shared store, and what kills cost."""
    _measure(".fleet.fleet_bench", as_json, quick=quick, raw=raw, part=part)


@app.command()
def recall(
    as_json: Json = False,
    part: Annotated[
        str,
        typer.Option(
            help="all, mixed, exact, speed, needle, chats: all real engines but the first."
        ),
    ] = "all",
    quick: Quick = False,
    seed: int = 1,
) -> None:
    """What comes back at another position, how fast, and whether anybody else ever meets it."""
    _measure(".recall.recall_bench", as_json, part=part, quick=quick, seed=seed)


@app.command()
def kernels(as_json: Json = False, model: Model = None) -> None:
    """Measure moving KV, on a GPU if there is one, else on the CPU, beside copies and prefill."""
    _measure(".kernels.kernels", as_json, model=model)


@app.command()
def tiers(
    as_json: Json = False,
    part: Annotated[str, typer.Option(help="all, texts, pressure or idle.")] = "all",
    pairs: Annotated[int, typer.Option(min=1, help="Rounds without memory pressure (idle).")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all arms under pressure.")] = 1,
    pace: Annotated[
        float | None, typer.Option(min=0.1, help="Factor on the script's pauses; else measured.")
    ] = None,
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Where details and logs go.")] = Path(".tiers"),
) -> None:
    """Run a real vLLM, agents with tool pauses under pressure: stock, tiers, tiers without
    parts.
    """
    with _explained():
        from .tiers.tiers import Part, run, save_details

        _check_part(part, Part)
        result = run(
            progress=not as_json,
            pairs=pairs,
            model=model,
            out=out,
            part=Part(part),
            pace=pace,
            rounds=rounds,
        )
        save_details(result)
    result.figures().print(as_json)


@app.command()
def agents(
    as_json: Json = False,
    quick: Annotated[bool, typer.Option(help="One pool, and fewer runs.")] = False,
    arms: Arms = None,
    sessions: Sessions = None,
    requests: Requests = None,
    stock: Stock = None,
    seed: int = 1,
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Where details and logs go.")] = Path(".agents"),
    closed: Closed = False,
    paper: Paper = False,
    by_clock: Open = False,
    best: Best = None,
    pairs: Pairs = None,
) -> None:
    """Run a real vLLM with recorded agents: stock, the graph, hints, host memory; and the lab."""
    mode = "--closed --paper" if paper else "--closed" if closed else "--open" if by_clock else ""
    if by_clock and (closed or paper):
        raise typer.BadParameter("not with --closed or --paper", param_hint="--open")
    if paper and not closed:
        raise typer.BadParameter("is an option of --closed", param_hint="--paper")
    _check_taken(
        mode, arms=arms, requests=requests, stock=stock, model=model, best=best, pairs=pairs
    )
    shares = _shares(stock)
    with _explained():
        from .agents.agents import QUICK, Scale, run, save_details
        from .agents.agents_arms import ARMS
        from .closed.closed import run_closed_bench, save_closed
        from .closed.closed_paper import run_paper
        from .closed.closed_pass import CLOSED_ARMS
        from .closed.open_paper import run_open
        from .recorded.agents_requests import SESSIONS

        shown, sessions = not as_json, sessions or SESSIONS
        result: Any
        if by_clock:
            if shares is not None and len(shares) > 1:
                raise typer.BadParameter(f"{stock!r}; --open takes one share", param_hint="--stock")
            share = shares[0] if shares else 0.6
            result = run_open(shown, quick, sessions, seed, requests, share, out)
            result.save()
        elif paper:
            result = run_paper(shown, quick, sessions, seed, out, best)
            save_closed(result)
        elif closed:
            result = run_closed_bench(
                shown, quick, best, pairs, _chosen(arms, CLOSED_ARMS), sessions, seed, model, out
            )
            save_closed(result)
        else:
            scale = (QUICK if quick else Scale()).cut(requests, shares)
            result = run(
                shown, scale, _chosen(arms, ARMS), sessions, seed, model, out, save_details
            )
            save_details(result)
    result.figures().print(as_json)


_TAKEN: Final = {
    "": ("arms", "requests", "stock", "model"),
    "--closed": ("arms", "model", "best", "pairs"),
    "--closed --paper": ("best",),
    "--open": ("requests", "stock"),
}
"""Of the options that not all ways to run ``bench agents`` take, each way's."""


def _check_taken(mode: str, **options: object) -> None:
    """Refuse options that would do nothing."""
    for name, value in options.items():
        if value is not None and name not in _TAKEN[mode]:
            taken = ", ".join(f"--{each}" for each in _TAKEN[mode])
            problem = (
                f"does nothing {f'with {mode}' if mode else 'without --closed'}; allowed: {taken}"
            )
            raise typer.BadParameter(problem, param_hint=f"--{name}")


def _shares(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}; allowed: .5 or .5,.7", param_hint="--stock") from error
    if not all(0 < share < 1 for share in shares):
        raise typer.BadParameter(f"{text!r}; allowed: between 0 and 1", param_hint="--stock")
    return shares


def _chosen(arms: str | None, known: Sequence[AgentArm]) -> list[AgentArm] | None:
    """Stock and the named arms; None: those that the scale has."""
    if arms is None:
        return None
    by_name = {arm.name: arm for arm in known}
    names = dict.fromkeys(("stock", *arms.split(",")))
    if unknown := [name for name in names if name not in by_name]:
        raise typer.BadParameter(
            f"{unknown[0]!r}; allowed: {', '.join(by_name)}", param_hint="--arms"
        )
    return [by_name[name] for name in names]


@app.command()
def faults(
    names: Annotated[
        list[str] | None, typer.Argument(help="Faults to run; without one, all.")
    ] = None,
    as_json: Json = False,
    full: Annotated[
        bool, typer.Option(help="At full size; resumes where an earlier run stopped.")
    ] = False,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="Hours of random traffic (traffic).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    only: Annotated[
        str, typer.Option(help="Mends with this in their names or files (mends).")
    ] = "",
    out: Annotated[Path, typer.Option(help="Where each fault's result is kept.")] = Path(".faults"),
) -> None:
    """Inject faults and say what held: by name, or all in about half an hour on two idle cores."""
    with _explained():
        from .faults.faults import run

        chosen = secrets.randbelow(1 << 30) if seed is None else seed
        figures: Figures = run(names or [], full, chosen, out, not as_json, hours, only)
    figures.print(as_json)


@app.command()
def demo(
    as_json: Json = False, model: Model = None, out: Out = DEFAULT_OUT, part: Part = "all"
) -> None:
    """Run the demo with figures, and keep them in demo.json. Eight minutes on two idle cores."""
    _run_demo(model, out, part).figures().print(as_json)


@demo_app.callback(invoke_without_command=True)
def demo_for_people(
    as_json: Json = False, model: Model = None, out: Out = DEFAULT_OUT, part: Part = "all"
) -> None:
    """Run too many agents, simulated and on a real vLLM; then show what is found, stock and with
    hints.
    """
    if part == "page":
        _run_page()
        return
    if part == "fleet":
        _run_fleet(model, out, as_json)
        return
    if as_json:
        demo(True, model, out, part)
        return
    _run_demo(model, out, part, printed=True)


def _run_demo(model: str | None, out: Path, part: str, printed: bool = False) -> DemoRun:
    """Run all parts or one; ``printed``: with a page, tables as they come, and last words."""
    if part not in ("all", "cliff", "engine", "found"):
        raise typer.BadParameter(
            f"{part!r}; allowed: all, cliff, engine, found, page, fleet", param_hint="--part"
        )
    with _explained(), contextlib.ExitStack() as watching:
        from .demo import cliff, demo, engine_cliff
        from .demo.page_demo import LivePage, agents_at
        from .serving.progress import DemoProgress

        out = out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        done = demo.DemoRun(out)
        page: LivePage | None = None
        if printed:
            page = watching.enter_context(LivePage())
            Console(stderr=True).print(page.invitation, soft_wrap=True)
        if part in ("all", "cliff"):
            with agents_at(page), DemoProgress(0) as shown:
                done.cliff = cliff.run_cliff(out, shown)
            cliff.save_cliff(done.cliff)
            if printed:
                cliff.print_cliff(done.cliff)
        if part in ("all", "engine"):
            with DemoProgress(0) as shown:
                done.engine = engine_cliff.run_engine_cliff(model, out, shown, page)
            if printed:
                engine_cliff.print_engine_cliff(done.engine)
        if part in ("all", "found"):
            if page is not None:
                page.begin_anew()
            with agents_at(page), DemoProgress(0) as shown:
                done.found = demo.run_found(out, shown)
        if printed and done.found is not None:
            demo.print_report(done.found)
        done.save()
        if page is not None:
            demo.print_last_words(done, page.address)
    return done


def _run_page() -> None:
    from .demo.page_demo import run_page

    with _explained(), contextlib.suppress(KeyboardInterrupt):
        run_page()


def _run_fleet(model: str | None, out: Path, as_json: bool) -> None:
    from .fleet.fleet_demo import print_fleet, run_fleet_demo, save_fleet

    with _explained():
        out = out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        result = run_fleet_demo(out, model, progress=not as_json)
    save_fleet(result)
    if as_json:
        result.figures().print(as_json=True)
    else:
        print_fleet(result)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns the errors that a user can act on into a message and an exit code."""
    previous = signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout has the figures
    try:
        yield
    except ImportError as error:
        _give_up(f"{error.name} is not installed: pip install 'kvgraph[bench,cpu]'")
    except BenchError as error:
        _give_up(str(error), error.exit_code)
    except OSError as error:  # a full disk, a model that is not there
        _give_up(f"{type(error).__name__}: {error}")
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _give_up(problem: str, code: int = 1) -> NoReturn:
    Console(stderr=True).print(problem, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)
