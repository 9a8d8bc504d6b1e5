"""``kvgraph calibrate``: measures a model and keeps the result where engines look for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from ...graph.errors import ConfigError
from ...kernels.errors import KernelError
from ..recall.gate import Calibration, calibration_file, save
from .report import report
from .trials import FURTHEST, MARGINS, Cell, Measured, grid, measure
from .verdict import DEFAULT_BAR, Bar, Verdict, judge_margins

_SAMPLES: Final = 8  # prompts of each kind; chosen
_FEW: Final = 2

Model = Annotated[str, typer.Argument(help="As `vllm serve` is given it.")]
Text = Annotated[Path | None, typer.Option(help="Text to measure with; else sources.")]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Prompts of each kind: 8; 2 if --quick.")
]  # fmt: skip
MostKl = Annotated[float, typer.Option(min=0, help="Mean divergence allowed, nats.")]
LeastAgreement = Annotated[
    float, typer.Option(min=0, max=1, help="Share of tokens that must stay the same.")
]
Furthest = Annotated[int, typer.Option(min=64, help="Largest distance that is measured, tokens.")]
MaxLen = Annotated[int | None, typer.Option(help="As the engine is given it.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer lengths, distances and samples.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(add_completion=False)


@app.callback(
    # Options may stand behind the model: there are no sub-commands.
    invoke_without_command=True,
    context_settings={"allow_interspersed_args": True},
)
def calibrate(
    model: Model, text: Text = None, samples: Samples = None,
    most_kl: MostKl = DEFAULT_BAR.most_kl,
    least_agreement: LeastAgreement = DEFAULT_BAR.least_agreement,
    furthest: Furthest = FURTHEST, max_model_len: MaxLen = None, device: Device = "cpu",
    quick: Quick = False, seed: int = 1, as_json: Json = False,
) -> None:  # fmt: skip
    """Measure what MODEL says behind text that was moved to other positions, and keep the verdict.

    Without a calibration that passed, an engine brings nothing back at another position. It takes
    long: 135 million parameters took 24 minutes with --samples 2, on two busy cores. A model that
    fails with few computed tokens behind each piece is measured with more, twice.
    """
    prompts = samples or (_FEW if quick else _SAMPLES)
    try:
        bar = Bar(most_kl, least_agreement)
        calibration, kind = run(
            model, text, prompts, bar, max_model_len, device, quick, furthest, random.Random(seed)
        )  # fmt: skip
    except ImportError as error:
        raise _given_up(f"{error.name} is not installed: pip install 'kvgraph[cpu]'") from None
    except (ConfigError, KernelError, OSError, ValueError) as error:
        raise _given_up(str(error)) from None
    path = calibration_file(calibration.identity)
    save(calibration, path)
    if as_json:
        typer.echo(json.dumps({"path": str(path), "text": kind, **_plain(calibration)}))
    else:
        report(calibration, kind, path, bar)
    if not calibration.passed:
        raise typer.Exit(1)


def run(
    name: str, text: Path | None, samples: int, bar: Bar, max_model_len: int | None, device: str,
    quick: bool, furthest: int, rng: random.Random,
) -> tuple[Calibration, str]:  # fmt: skip
    """Measure a model; returns the calibration, and what text it was measured with.

    Raises:
        ConfigError: The model cannot be calibrated.
        KernelError: Its keys cannot be moved, or its weights not be told from others.
    """
    import torch

    from ..vllm.recall.model_identity import model_identity
    from .texts import texts_for

    loaded, tokenizer = _load(name, device, max_model_len)
    config = loaded.model.config
    longest = min(max_model_len or 1 << 20, int(config.max_position_embeddings))
    described: Any = SimpleNamespace(model=name, hf_config=config)
    identity = model_identity(described, max_model_len or int(config.max_position_embeddings))
    grids = [grid(longest, quick, margin, furthest) for margin in MARGINS]
    most = max((cell.longest for cells in grids for cell in cells), default=longest)
    texts = texts_for(tokenizer, int(config.vocab_size), most, text, rng, torch.device(device))
    loaded.check_rotation(texts.draw(64))
    verdict, measured = _judged(loaded, grids, samples, texts.draw, bar)
    rows = tuple(each.plain() for each in measured)
    return (
        Calibration(name, identity, verdict.passed, verdict.reason, verdict.limits, rows),
        texts.kind,
    )


def _judged(
    loaded: Any, grids: Sequence[Sequence[Cell]], samples: int, draw: Callable[[int], Any], bar: Bar
) -> tuple[Verdict, list[Measured]]:
    """Measure and judge, and say on stderr what is under way."""
    number, most = count(1), sum(map(len, grids))
    with Console(stderr=True).status("measuring") as status:

        def shown(cell: Cell) -> Measured:
            status.update(
                f"splice {next(number)} of {most} at most: {cell.joints} × {cell.tokens} tokens "
                f"moved by {cell.delta:+d}, the next {cell.margin} computed"
            )
            return measure(loaded, cell, samples, draw)

        return judge_margins(grids, shown, bar)


def _load(name: str, device: str, max_model_len: int | None) -> tuple[Any, Any]:
    """The model and its tokenizer; the latter is None if there is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ...kernels.maths.rope import rope_from_config
    from .spliced_model import SplicedModel

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


def _plain(calibration: Calibration) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(calibration)


def _given_up(problem: str) -> typer.Exit:
    Console(stderr=True).print(f"kvgraph: {problem}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)
