"""``kvgraph calibrate``: calibrates a model and keeps the result where engines look for it."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from ...graph.errors import ConfigError
from ...kernels.errors import KernelError
from ...kernels.rope import rope_from_config
from ..recall.gate import Calibration, calibration_file, save
from .trials import (
    DEFAULT_BAR,
    FURTHEST,
    MARGINS,
    CalibrationVerdict,
    Cell,
    CellResult,
    PassMark,
    SplicedModel,
    Tensor,
    grid,
    judge_margins,
    measure,
)

_HEADS: Final = (
    "tokens", "moved by", "pieces", "gen.", "behind", "KL", "p95", "same", "wrong Δ", "left out",
    "ok",
)  # fmt: skip
_LEGEND: Final = (
    "moved by: − towards the beginning, + towards the end; * from the beginning of its prompt. "
    "gen.: 1 computed behind computed text, 2 behind spliced text, and so on. behind: tokens of it "
    "that are computed. KL: mean divergence of the next tokens, nats. same: first choices that "
    "stay. wrong Δ, left out: KL with a wrong rotation, and without the text."
)
_WHAT_NOW: Final = (
    "This model's engines splice nothing. If the text is not like yours, name one with --text; if "
    "figures near the bar differ from run to run, take more --samples. --most-kl and "
    "--least-agreement lower the bar: answers then change as much as the table says."
)
_LAX: Final = (
    "The bar is below the default's (0.1 nats, 90 %): answers of requests with recall change as "
    "much as the table says."
)


def report(calibration: Calibration, kind: str, path: object, bar: PassMark) -> None:
    console = Console()
    console.print(table_of(calibration.cells, bar))
    verdict = "passed" if calibration.passed else "FAILED"
    lines = [_LEGEND, f"text: {kind}", f"{verdict}: {calibration.reason}"]
    if not calibration.passed:
        lines.append(_WHAT_NOW)
    elif bar.most_kl > DEFAULT_BAR.most_kl or bar.least_agreement < DEFAULT_BAR.least_agreement:
        lines.append(_LAX)
    for line in (*lines, f"kept in {path}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def table_of(cells: Sequence[Mapping[str, Any]], bar: PassMark) -> Table:
    table = Table(title="spliced beside computed", box=None, padding=(0, 1, 0, 0))
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for cell in cells:
        moved = cell["distance"] if cell["later"] else -cell["distance"]
        fits = bar.allows(cell["kl"], cell["agreement"])
        table.add_row(
            f"{cell['tokens']}{' int8' if cell['int8'] else ''}",
            f"{moved:+d}{'*' if cell['opening'] else ''}".replace("-", "−"),
            str(cell["joints"]), str(cell["generations"]), str(cell["margin"]),
            f"{cell['kl']:.3f}", f"{cell['kl_p95']:.2f}", f"{100 * cell['agreement']:.0f} %",
            f"{cell['wrong_kl']:.2f}", f"{cell['without_kl']:.2f}", "yes" if fits else "no",
        )  # fmt: skip
    return table


_SAMPLES: Final = 8  # prompts of each kind; chosen
_FEW: Final = 2

Model = Annotated[str, typer.Argument(help="As `vllm serve` is given it.")]
Text = Annotated[
    Path | None, typer.Option(help="Text to measure with; without it, Python's own sources.")
]
Samples = Annotated[int | None, typer.Option(min=1, help="Prompts of each kind: 8; 2 if --quick.")]
MostKl = Annotated[float, typer.Option(min=0, help="Mean divergence allowed, nats.")]
LeastAgreement = Annotated[
    float, typer.Option(min=0, max=1, help="Share of tokens that must stay the same.")
]
Furthest = Annotated[int, typer.Option(min=64, help="Largest distance that is measured, tokens.")]
MaxLen = Annotated[
    int | None, typer.Option(help="Tokens, as the engine is given it; without it, the model's own.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer lengths, distances and samples.")]
Seed = Annotated[int, typer.Option(help="Seed of the choice of text.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(add_completion=False)


@app.callback(
    # Options may follow the model, even if the app is called on its own.
    invoke_without_command=True,
    context_settings={"allow_interspersed_args": True},
)
def calibrate(
    model: Model, text: Text = None, samples: Samples = None,
    most_kl: MostKl = DEFAULT_BAR.most_kl,
    least_agreement: LeastAgreement = DEFAULT_BAR.least_agreement,
    furthest: Furthest = FURTHEST, max_model_len: MaxLen = None, device: Device = "cpu",
    quick: Quick = False, seed: Seed = 1, as_json: Json = False,
) -> None:  # fmt: skip
    """Measure what MODEL says behind text that was moved to other positions, and keep the verdict.

    Without a calibration that passed, an engine brings nothing back at another position. It takes
    long: 135 million parameters took 24 minutes with --samples 2, on two busy cores. A model that
    fails with few computed tokens behind each piece is measured with more, twice.
    """
    prompts = samples or (_FEW if quick else _SAMPLES)
    try:
        bar = PassMark(most_kl, least_agreement)
        calibration, kind = run(
            model, text, prompts, bar, max_model_len, device, quick, furthest, random.Random(seed)
        )
    except ImportError as error:
        raise _given_up(f"{error.name} is not installed: pip install 'kvgraph[cpu]'") from None
    except (ConfigError, KernelError, OSError, ValueError) as error:
        raise _given_up(str(error)) from None
    path = calibration_file(calibration.identity)
    save(calibration, path)
    if as_json:
        typer.echo(json.dumps({"path": str(path), "text": kind, **asdict(calibration)}))
    else:
        report(calibration, kind, path, bar)
    if not calibration.passed:
        raise typer.Exit(1)


def run(
    name: str, text: Path | None, samples: int, bar: PassMark, max_model_len: int | None,
    device: str, quick: bool, furthest: int, rng: random.Random,
) -> tuple[Calibration, str]:  # fmt: skip
    """Measure a model; returns calibration and text's name. Raises ConfigError or KernelError."""
    from ..vllm.recall.support import model_identity

    loaded, tokenizer = _load(name, device, max_model_len)
    config = loaded.model.config
    longest = min(max_model_len or 1 << 20, int(config.max_position_embeddings))
    described: Any = SimpleNamespace(model=name, hf_config=config)
    identity = model_identity(described, max_model_len or int(config.max_position_embeddings))
    grids = [grid(longest, quick, margin, furthest) for margin in MARGINS]
    most = max((cell.longest for cells in grids for cell in cells), default=longest)
    draw, kind = texts_for(tokenizer, int(config.vocab_size), most, text, rng, torch.device(device))
    loaded.check_rotation(draw(64))
    verdict, measured = _judged(loaded, grids, samples, draw, bar)
    rows = tuple(each.plain() for each in measured)
    found = Calibration(name, identity, verdict.passed, verdict.reason, verdict.limits, rows)
    return found, kind


def _judged(
    loaded: Any,
    grids: Sequence[Sequence[Cell]],
    samples: int,
    draw: Callable[[int], Any],
    bar: PassMark,
) -> tuple[CalibrationVerdict, list[CellResult]]:
    number, most = count(1), sum(map(len, grids))
    with Console(stderr=True).status("measuring") as status:

        def shown(cell: Cell) -> CellResult:
            status.update(
                f"splice {next(number)} of {most} at most: {cell.joints} × {cell.tokens} tokens "
                f"moved by {cell.delta:+d}, the next {cell.margin} computed"
            )
            return measure(loaded, cell, samples, draw)

        return judge_margins(grids, shown, bar)


def _load(name: str, device: str, max_model_len: int | None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ConfigError(f"there is no directory {name}")
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    if getattr(model.config, "kv_lora_rank", None):
        raise ConfigError(f"{name} keeps latent vectors (MLA), which cannot be calibrated yet")
    longest = max_model_len or int(model.config.max_position_embeddings)
    rope = rope_from_config(model.config, longest)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        tokenizer = None
    return SplicedModel(model, rope), tokenizer


def _given_up(problem: str) -> typer.Exit:
    Console(stderr=True).print(f"kvgraph: {problem}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)


_FILES: Final = 60  # sources that are read; chosen
_VARIED: Final = 0.02  # distinct tokens per token; a text below this measures nothing; chosen


def texts_for(
    tokenizer: Any,
    vocabulary: int,
    longest: int,
    file: Path | None,
    rng: random.Random,
    device: Any,
) -> tuple[Callable[[int], Tensor], str]:
    """Return a function that draws consecutive tokens of a text, int64 [tokens], and a description
    of the text.

    The text is ``file``, or else Python sources, or random tokens if the tokenizer can encode
    neither. Raises ConfigError.
    """
    kind = str(file) if file else "Python's own sources"
    ids = _tokens(tokenizer, _read(file) if file else _sources())
    if file and len(ids) < 4 * longest:
        raise ConfigError(f"{file} has {len(ids)} tokens; needed: {4 * longest}")
    if (why := _unfit(ids, vocabulary, longest)) is not None:
        kind = f"random tokens: {why}"
        ids = [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(32 * longest)]

    def draw(tokens: int) -> Tensor:
        start = rng.randrange(max(1, len(ids) - tokens))
        return torch.tensor(ids[start : start + tokens], dtype=torch.int64, device=device)

    return draw, kind


def _unfit(ids: list[int], vocabulary: int, longest: int) -> str | None:
    """Why these tokens are no text to measure with; None if they are."""
    if len(ids) < 4 * longest:
        return f"{len(ids)} tokens of text are there; needed: {4 * longest}"
    if len(set(ids)) < _VARIED * min(len(ids), vocabulary):
        return "the tokenizer knows no words of text"
    return None


def _tokens(tokenizer: Callable[..., Any] | None, text: str) -> list[int]:
    if tokenizer is None:
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None


def _sources() -> str:
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES]
    return "\n\n".join(path.read_text("utf-8", errors="replace") for path in paths)
