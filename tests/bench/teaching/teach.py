"""Teach one small model and write it where it can be loaded from: weights, tokenizer, card."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..errors import InputError
from .lessons import IGNORED, Batch, Lessons, RecallLessons, TextLessons
from .recall_language import SIZE, examine

_WARM_UP: Final = 100
_LEAST: Final = 0.1  # of the rate, at the end


@dataclass
class Teacher:
    pupil: Pupil
    lessons: Lessons
    seed: int = 1

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.random = np.random.default_rng(self.seed)
        self.model = make_model(self.pupil)
        self.optimizers = _optimizers(self.model, self.pupil)
        self.step = 0

    def teach(self, say: Say) -> Any:
        while self.step < self.pupil.steps:
            loss, right, batch = self._one()
            self.step += 1
            if self.step % 50 == 0:
                say(f"{self.step} {batch.kind} loss {loss:.3f} right {right:.3f} {self._where()}")
        return self.model

    def _one(self) -> tuple[float, float, Batch]:
        batch = self.lessons.batch(self.step, self.random)
        ids, targets = torch.from_numpy(batch.ids), torch.from_numpy(batch.targets)
        self.model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(input_ids=ids, use_cache=False).logits
        judged = targets != IGNORED
        logits, targets = logits[judged].float(), targets[judged]
        loss = torch.nn.functional.cross_entropy(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate() * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        right = float((logits.argmax(-1) == targets).float().mean())
        self.lessons.heard(batch, right)
        return float(loss.detach()), right, batch

    def _rate(self) -> float:
        """Rises over the first steps and falls along a cosine to a tenth."""
        done = self.step / self.pupil.steps
        falling = _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.pupil.rate * min(1.0, (self.step + 1) / _WARM_UP) * falling

    def _where(self) -> str:
        return " ".join(f"{name} {value:.3g}" for name, value in self.lessons.state.items())


def _optimizers(model: Any, pupil: Pupil) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of a text's layers and Adam for the rest; recall is learned by Adam."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if pupil.course == "text" and _is_inner(name, p)]
    chosen = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": rest, "share": 1.0}], lr=pupil.rate, betas=(0.9, 0.98), weight_decay=0.0
        )
    ]
    if hidden:
        found.append(
            torch.optim.Muon(
                [{"params": hidden, "share": 1.0}],
                lr=pupil.rate,
                weight_decay=0.0,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return found


def _is_inner(name: str, parameter: Any) -> bool:
    outside = ("embed", "lm_head", "wte", "wpe")
    return parameter.ndim == 2 and not any(part in name for part in outside)


_BASE: Final = 5e5  # of RoPE


@dataclass(frozen=True, slots=True)
class Pupil:
    name: str
    family: str  # ``llama`` or ``gpt2``
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    steps: int  # batches of about 4,096 tokens
    course: str  # ``recall`` or ``text``
    longest: int = 1024  # tokens of the longest text that it is shown
    rate: float = 3e-3


PUPILS: Final = {
    pupil.name: pupil
    for pupil in (
        Pupil("recall", "llama", 128, 3, 2, 256, 3500, "recall", 512, rate=2e-3),
        Pupil("text-1m", "llama", 128, 4, 4, 1024, 1200, "text"),
        Pupil("text-2m", "llama", 192, 3, 3, 1024, 950, "text"),
        Pupil("text-gpt2", "gpt2", 128, 4, 4, 1024, 1100, "text"),
    )
}


def make_model(pupil: Pupil) -> Any:
    return _gpt2(pupil) if pupil.family == "gpt2" else _llama(pupil)


def _llama(pupil: Pupil) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=pupil.vocabulary,
        hidden_size=pupil.hidden,
        intermediate_size=3 * pupil.hidden,
        num_hidden_layers=pupil.layers,
        num_attention_heads=pupil.heads,
        num_key_value_heads=pupil.heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": _BASE},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _gpt2(pupil: Pupil) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=pupil.vocabulary,
        n_embd=pupil.hidden,
        n_layer=pupil.layers,
        n_head=pupil.heads,
        n_positions=pupil.longest,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


VOCABULARY: Final = 1024  # chosen: embeddings stay a quarter of a model of a million parameters
END: Final = "<|end|>"  # stands between documents; its number is 0
_SHORTEST: Final = 4_000  # characters; a shorter document has nothing far back
_HELD_OUT: Final = 20  # every twentieth document is for measuring

Ids = NDArray[np.uint16]


class Corpus(NamedTuple):
    """Tokens of all documents, each ended by ``END``."""

    tokenizer: Tokenizer
    taught: Ids  # uint16 [tokens] to learn from


def read_documents(folder: Path, pattern: str = "*.rst.txt") -> list[str]:
    """All texts below ``folder`` that are long enough, each once, in the order of their names."""
    paths = sorted({path.resolve() for path in folder.rglob(pattern)})
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    long = [text for text in texts if len(text) >= _SHORTEST]
    if not long:
        raise InputError(f"no {pattern} of {_SHORTEST} characters below {folder}")
    return long


def read_corpus(folder: Path) -> Corpus:
    """Learn a tokenizer from what may be learned from, and number everything."""
    texts = read_documents(folder, "*.rst.txt")
    taught = [text for n, text in enumerate(texts) if n % _HELD_OUT]
    tokenizer = learn_tokenizer(taught)
    end = [0]
    numbered = [each.ids + end for each in tokenizer.encode_batch(taught)]
    return Corpus(tokenizer, np.concatenate([np.array(n, np.uint16) for n in numbered]))


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


_EXAMINED: Final = 96  # texts

Say = Callable[[str], None]


def teach(name: str, out: Path, text: Path | None, say: Say) -> Path:
    if name not in PUPILS:
        raise InputError(f"no model is called {name!r}; there are: {', '.join(PUPILS)}")
    pupil = PUPILS[name]
    torch.set_num_threads(1)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    corpus = None if pupil.course == "recall" or text is None else read_corpus(text)
    teacher = Teacher(pupil, _lessons(pupil, corpus))
    began = time.monotonic()
    model = teacher.teach(say)
    say(f"{name}: {time.monotonic() - began:.0f} s")
    write_model(model, corpus.tokenizer if corpus else recall_tokenizer(), folder)
    if pupil.course == "recall":
        say(str(examine(model.float().eval(), pupil.longest, pupil.longest // 16, _EXAMINED)))
    return folder


def _lessons(pupil: Pupil, corpus: Corpus | None) -> Lessons:
    if pupil.course == "recall":
        return RecallLessons(pupil.longest)
    if corpus is None:
        raise InputError(f"{pupil.name} learns from a text; name its folder with --text")
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
