"""What models are measured on: held-out documents, and needles in them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..errors import BenchError
from ..teaching.lessons import needle

HELD_OUT: Final = Path(__file__).parent.parent / "held_out" / "python-docs.txt.gz"
_BETWEEN: Final = "\f"  # documents are separated by a form feed


def documents(source: Path | None) -> list[str]:
    """Texts of a file (gzipped or not, form feeds between documents) or of a folder's files.

    Raises:
        BenchError: There is none.
    """
    source = source or HELD_OUT
    if source.is_dir():
        paths = sorted({path.resolve() for path in source.rglob("*.txt")})
        found = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    elif source.is_file():
        raw = source.read_bytes()
        text = (gzip.decompress(raw) if source.suffix == ".gz" else raw).decode()
        found = text.split(_BETWEEN)
    else:
        raise BenchError(f"no text at {source}")
    return [text for text in found if text.strip()]


def windows(tokenizer: Any, texts: list[str], count: int, length: int, seed: int) -> Tensor:
    """Windows [count, length] of documents that are long enough, one from each in turn.

    Raises:
        BenchError: No document is.
    """
    random = np.random.default_rng(seed)
    numbered = [tokenizer(text)["input_ids"] for text in texts]
    long = [ids for ids in numbered if len(ids) >= length]
    if not long:
        raise BenchError(f"no document has {length} tokens")
    order = random.permutation(len(long))
    rows = []
    for number in range(count):
        ids = long[order[number % len(long)]]
        start = int(random.integers(0, len(ids) - length + 1))
        rows.append(torch.tensor(ids[start : start + length]))
    return torch.stack(rows)


def haystacks(tokenizer: Any, texts: Tensor, depth: float, seed: int) -> tuple[Tensor, int]:
    """Texts with a made-up code told at ``depth`` of them and asked for at their end.

    Returns:
        Texts [texts, tokens], and how many of their last tokens are the answer.
    """
    random = np.random.default_rng(seed)
    rows, answers = [], []
    for text in texts:
        said = needle(random)
        asked, answer = said.rstrip().rstrip(".").rsplit(" ", 1)
        told = torch.tensor(tokenizer(said)["input_ids"])
        question = torch.tensor(tokenizer(asked)["input_ids"])
        ending = torch.tensor(tokenizer(" " + answer)["input_ids"])
        at = int(depth * (len(text) - len(told)))
        rows.append(torch.cat([text[:at], told, text[at:], question, ending]))
        answers.append(len(ending))
    shortest, judged = min(len(row) for row in rows), min(answers)
    return torch.stack([row[len(row) - shortest :] for row in rows]), judged
