"""The text that small models read: the sources of a documentation package, as numbered tokens.

Debian's ``python3.11-doc`` (PSF licence) is what the shipped models read. Its
documents are long, and they name what they defined pages before: a match of three
tokens more than 64 tokens back says the next token for one token in ten, twice as often as in the
Brown corpus. Debian's ``doc-rfc-std`` is not in its free section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..errors import BenchError

VOCABULARY: Final = 1024  # chosen: embeddings stay a quarter of a model of a million parameters
END: Final = "<|end|>"  # stands between documents; its number is 0
_SHORTEST: Final = 4_000  # characters; a shorter document has nothing far back
_HELD_OUT: Final = 20  # every twentieth document is for measuring

Ids = NDArray[np.uint16]


class Corpus(NamedTuple):
    """Tokens of all documents, each ended by ``END``.

    Attributes:
        taught: uint16 [tokens] to learn from.
        held_out: One uint16 [tokens] for each document that no model has read.
    """

    tokenizer: Tokenizer
    taught: Ids
    held_out: list[Ids]


def read_documents(folder: Path, pattern: str = "*.rst.txt") -> list[str]:
    """All texts below ``folder`` that are long enough, each once, in the order of their names.

    Raises:
        BenchError: There is none.
    """
    paths = sorted({path.resolve() for path in folder.rglob(pattern)})
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    long = [text for text in texts if len(text) >= _SHORTEST]
    if not long:
        raise BenchError(f"no {pattern} of {_SHORTEST} characters below {folder}")
    return long


def read_corpus(folder: Path, pattern: str = "*.rst.txt") -> Corpus:
    """Learn a tokenizer from what may be learned from, and number everything."""
    texts = read_documents(folder, pattern)
    taught = [text for n, text in enumerate(texts) if n % _HELD_OUT]
    tokenizer = learn_tokenizer(taught)
    end = [0]
    numbered = [each.ids + end for each in tokenizer.encode_batch(taught)]
    held_out = [
        np.array(each.ids + end, dtype=np.uint16)
        for each in tokenizer.encode_batch(texts[::_HELD_OUT])
    ]
    return Corpus(tokenizer, np.concatenate([np.array(n, np.uint16) for n in numbered]), held_out)


def learn_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level pairs, ``VOCABULARY`` of them: every text can be numbered and read back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
