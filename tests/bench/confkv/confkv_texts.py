"""What models are measured on: held-out documents, and needles in them."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

HELD_OUT: Final = Path(__file__).parent.parent / "held_out" / "python-docs.txt.gz"
_BETWEEN: Final = "\f"  # documents are separated by a form feed
_NEEDLE: Final = "\n\nRemember: the code of {name} is {code}.\n\n"
_SYLLABLES: Final = (
    "ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo"
)  # fmt: skip


def documents(source: Path | None) -> list[str]:
    """Texts of a file (gzipped or not, form feeds between documents) or of a folder's files."""
    source = source or HELD_OUT
    if source.is_dir():
        paths = sorted({path.resolve() for path in source.rglob("*.txt")})
        found = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    elif source.is_file():
        raw = source.read_bytes()
        text = (gzip.decompress(raw) if source.suffix == ".gz" else raw).decode()
        found = text.split(_BETWEEN)
    else:
        raise InputError(f"no text at {source}")
    return [text for text in found if text.strip()]


def windows(tokenizer: Any, texts: list[str], count: int, length: int, seed: int) -> Tensor:
    """Windows [count, length] of documents that are long enough, one from each in turn."""
    random = np.random.default_rng(seed)
    numbered = [tokenizer(text)["input_ids"] for text in texts]
    long = [ids for ids in numbered if len(ids) >= length]
    if not long:
        raise InputError(f"no document has {length} tokens")
    order = random.permutation(len(long))
    rows = []
    for number in range(count):
        ids = long[order[number % len(long)]]
        start = int(random.integers(0, len(ids) - length + 1))
        rows.append(torch.tensor(ids[start : start + length]))
    return torch.stack(rows)


def needle(random: np.random.Generator) -> str:
    """A sentence that cannot be guessed: a made-up name and its code of five digits."""
    name = "".join(random.choice(_SYLLABLES, size=3)).capitalize()
    return _NEEDLE.format(name=name, code="".join(map(str, random.integers(0, 10, size=5))))


class Told(NamedTuple):
    told: Tensor  # [codes, tokens], the sentence that tells each
    question: Tensor  # [codes, tokens], its beginning, without the code
    answer: Tensor  # [codes, tokens], the code


def told_codes(tokenizer: Any, count: int, seed: int) -> Told:
    """Draw ``count`` sentences whose parts have the most frequent numbers of tokens."""
    random, drawn = np.random.default_rng(seed), []
    shapes: Counter[tuple[int, ...]] = Counter()
    while not shapes or max(shapes.values()) < count:
        for _ in range(count):
            said = needle(random)
            asked, code = said.rstrip().rstrip(".").rsplit(" ", 1)
            ids = [tokenizer(part)["input_ids"] for part in (said, asked, " " + code)]
            shape = tuple(map(len, ids))
            shapes[shape] += 1
            drawn.append((shape, ids))
    usual = max(shapes, key=lambda shape: shapes[shape])
    found = [ids for shape, ids in drawn if shape == usual][:count]
    return Told(*(torch.tensor(column) for column in zip(*found, strict=True)))


def haystacks(tokenizer: Any, texts: Tensor, depth: float, seed: int) -> tuple[Tensor, int]:
    """Texts with a made-up code told at ``depth`` of them and asked for at their end."""
    codes = told_codes(tokenizer, len(texts), seed)
    at = int(depth * (texts.shape[1] - codes.told.shape[1]))
    parts = (texts[:, :at], codes.told, texts[:, at:], codes.question, codes.answer)
    return torch.cat(parts, 1), codes.answer.shape[1]
