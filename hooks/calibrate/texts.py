"""Text to calibrate with: a file of the user's, or what every Python has, its own sources."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from ...graph.errors import ConfigError
from .spliced_model import Tensor

_FILES: Final = 60  # sources that are read; chosen
_VARIED: Final = 0.02  # distinct tokens per token, below which a text says nothing; chosen


class Texts:
    """Draws pieces of one text.

    Args:
        ids: The text's tokens.
        rng: Where a piece begins.
        device: Where the model is.

    Attributes:
        kind: What text it is, in words.
    """

    def __init__(self, ids: list[int], kind: str, rng: random.Random, device: Any) -> None:
        self._ids, self.kind, self._rng, self._device = ids, kind, rng, device

    def draw(self, tokens: int) -> Tensor:
        """Adjoining tokens from somewhere in the text, int64 [tokens]."""
        start = self._rng.randrange(max(1, len(self._ids) - tokens))
        return torch.tensor(
            self._ids[start : start + tokens], dtype=torch.int64, device=self._device
        )


def texts_for(
    tokenizer: Any,
    vocabulary: int,
    longest: int,
    file: Path | None,
    rng: random.Random,
    device: Any,
) -> Texts:
    """Text of ``file``, or else Python sources; random tokens where the tokenizer knows neither.

    Raises:
        ConfigError: The file cannot be read, or holds less than four times the longest sequence.
    """
    kind = str(file) if file else "Python's own sources"
    ids = _tokens(tokenizer, _read(file) if file else _sources())
    if file and len(ids) < 4 * longest:
        raise ConfigError(f"{file} has {len(ids)} tokens; needed: {4 * longest}")
    if (why := _unfit(ids, vocabulary, longest)) is not None:
        kind = f"random tokens: {why}"
        ids = [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(32 * longest)]
    return Texts(ids, kind, rng, device)


def _unfit(ids: list[int], vocabulary: int, longest: int) -> str | None:
    """Why these tokens are no text to measure with; None: they are."""
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
