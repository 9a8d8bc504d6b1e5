"""``kvgraph prior``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def prior(
    sessions: Annotated[Path, typer.Argument(help="Recorded sessions: a file or a directory.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz file to write.")],
    seed: Annotated[int, typer.Option(help="Seed of callers' guesses of tools' pauses.")] = 0,
) -> None:
    """Learn from recorded sessions when sessions return: where the lifecycle policy starts from."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    from ...policies.prior import packed
    from ..errors import TraceError
    from ..recordings.weka import read_sessions
    from .prior_learning import STEPS, learn_prior

    with Console(stderr=True).status("reading sessions") as status:
        found = read_sessions(
            sessions, progress=lambda files: status.update(f"reading sessions: {files}")
        )
        with threadpool_limits(1, user_api="blas"):
            learned = learn_prior(
                found,
                seed=seed,
                progress=lambda steps: status.update(f"learning: step {steps:,} of {STEPS:,}"),
            )
    try:
        np.savez_compressed(out, allow_pickle=False, **packed(learned))
    except OSError as error:
        raise TraceError(f"{out}: cannot be written: {error.strerror or error}") from None
    typer.echo(f"learned from {len(found):,} sessions, written to {out}", err=True)
