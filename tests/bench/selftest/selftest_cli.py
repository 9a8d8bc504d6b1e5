"""``kvgraph selftest …``; what is tested is imported only when it is."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final, NoReturn

import typer

if TYPE_CHECKING:
    from .kernel_checks import Report

app = typer.Typer(no_args_is_help=True, help="Try what only a machine like yours can show.")

NO_GPU: Final = 2  # the exit code where there is nothing to test
CHECKS_S: Final = 90.0  # compiling included; no check begins later
BENCH_S: Final = 120.0  # after which no cell of the matrix is begun; with its start, under three
_SEED: Final = 1


@app.callback()
def selftest() -> None:
    """Try what only a machine like yours can show."""


@app.command()
def gpu() -> None:
    """All kernels on this GPU, against torch on the CPU, then the bench: one report, to send back.
    Takes less than five minutes. Exit 1: something is wrong. Exit 2: there is no GPU.
    """
    try:
        import torch
    except ImportError:
        _refuse("torch is not installed: pip install 'kvgraph[vllm]'")
    if not torch.cuda.is_available():
        why = "no driver or device" if torch.version.cuda else "this torch is not built for CUDA"
        _refuse(
            f"no GPU that torch can use ({why}): no kernel was run, and there is nothing to "
            "report; `kvgraph bench kernels` runs without one"
        )
    report = run_on_gpu()
    typer.echo(json.dumps(report.as_dict(), indent=1))
    typer.echo("please send this report back: all of it", err=True)
    raise typer.Exit(0 if report.ok else 1)


def run_on_gpu() -> Report:
    from .kernel_checks import Gpu, Report, checks, gpu_checks, run_checks

    began = time.monotonic()
    place = Gpu()
    report = Report(place.name)
    chosen = [*checks(_SEED), *gpu_checks()]
    run_checks(report, place, chosen, _say, began + CHECKS_S)
    _measure(report)
    report.seconds = time.monotonic() - began
    return report


def _measure(report: Report) -> None:
    from ..kernels.kernels_gpu import run

    try:
        figures = run(_say, report.bench.append, BENCH_S)
    except Exception as error:
        report.problem = f"the bench ended: {type(error).__name__}: {error}"
        return
    report.bench.append({"figures": {figure.name: figure.as_dict() for figure in figures}})


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _refuse(problem: str) -> NoReturn:
    typer.echo(f"kvgraph selftest gpu: {problem}", err=True)
    raise typer.Exit(NO_GPU)
