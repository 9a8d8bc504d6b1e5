"""Teach one small model and write it where it can be loaded from: weights, tokenizer, card."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from ..errors import BenchError
from .corpus import Corpus, read_corpus
from .lessons import Lessons, RecallLessons, TextLessons
from .pupils import PUPILS, Pupil
from .recall_exam import examine
from .recall_language import SIZE
from .teacher import Teacher

_EXAMINED: Final = 96  # texts

Say = Callable[[str], None]


def teach(
    name: str, out: Path, text: Path | None, paused_by: Path | None, steps: int | None, say: Say
) -> Path:
    """Teach the pupil called ``name`` on one thread; what is half done in ``out`` goes on.

    Returns:
        The folder with the model.

    Raises:
        BenchError: There is no such pupil, or no text for it.
    """
    if name not in PUPILS:
        raise BenchError(f"no model is called {name!r}; there are: {', '.join(PUPILS)}")
    pupil = PUPILS[name]
    torch.set_num_threads(1)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    corpus = None if pupil.course == "recall" or text is None else read_corpus(text)
    lessons = _lessons(pupil, corpus)
    teacher = Teacher(pupil, lessons, out / f"{name}.state", paused_by)
    began = time.monotonic()
    model = teacher.teach(say, steps)
    say(f"{name}: {time.monotonic() - began:.0f} s")
    write_model(model, corpus.tokenizer if corpus else recall_tokenizer(), folder)
    if pupil.course == "recall":
        say(str(examine(model.float().eval(), pupil.longest, pupil.longest // 16, _EXAMINED)))
    return folder


def _lessons(pupil: Pupil, corpus: Corpus | None) -> Lessons:
    if pupil.course == "recall":
        return RecallLessons(pupil.longest)
    if corpus is None:
        raise BenchError(f"{pupil.name} learns from a text; name its folder with --text")
    return TextLessons(corpus.tokenizer, corpus.taught, pupil.steps * 6 // 10, pupil.longest)


def write_model(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in half precision (they are loaded as float32), configuration and tokenizer."""
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def recall_tokenizer() -> Tokenizer:
    """Words ``t0`` to ``t255``, a number each, so that an engine can be asked in text."""
    words = {f"t{n}": n for n in range(SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
