"""What a calibration measured, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ..recall.gate import Calibration
from .verdict import DEFAULT_BAR, Bar

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
    "The bar is below the default's (.1 nats, 90 %): answers of requests with recall change as "
    "much as the table says."
)


def report(calibration: Calibration, kind: str, path: object, bar: Bar) -> None:
    """Print what was measured and what follows.

    Args:
        kind: What text it was measured with.
        path: Where the calibration is kept.
        bar: What was to be shown.
    """
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


def table_of(cells: Sequence[Mapping[str, Any]], bar: Bar) -> Table:
    """A row for each cell; it fits into 80 columns."""
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
