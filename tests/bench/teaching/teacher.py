"""The loop that teaches: one thread, in bfloat16 products, resumable, and polite to its machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .lessons import IGNORED, Batch, Lessons
from .pupils import Pupil, make_model

_WARM_UP: Final = 100
_SAVED_EVERY_S: Final = 60.0
_LEAST: Final = 0.1  # of the rate, at the end

Say = Callable[[str], None]


@dataclass
class Teacher:
    """Teaches one model.

    Attributes:
        kept: Where its state is kept between runs.
        paused_by: While this file exists, nothing is computed.
    """

    pupil: Pupil
    lessons: Lessons
    kept: Path
    paused_by: Path | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.random = np.random.default_rng(self.seed)
        self.model = make_model(self.pupil)
        self.optimizers = _optimizers(self.model, self.pupil)
        self.step = 0
        if self.kept.exists():
            self._resume()

    def teach(self, say: Say, steps: int | None = None) -> Any:
        """Teach until the pupil's steps are done, and return the model."""
        last, saved = steps or self.pupil.steps, time.monotonic()
        while self.step < last:
            self._wait()
            loss, right, batch = self._one()
            self.step += 1
            if self.step % 50 == 0:
                say(f"{self.step} {batch.kind} loss {loss:.3f} right {right:.3f} {self._where()}")
            if time.monotonic() - saved > _SAVED_EVERY_S:
                self._save()
                saved = time.monotonic()
        self._save()
        return self.model

    def _one(self) -> tuple[float, float, Batch]:
        """One step; returns loss, share of right answers, and what was shown."""
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

    def _wait(self) -> None:
        while self.paused_by is not None and self.paused_by.exists():
            time.sleep(1.0)

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "step": self.step,
            "random": self.random.bit_generator.state,
            "lessons": dict(self.lessons.state),
        }
        beside = self.kept.with_suffix(".part")
        torch.save(state, beside)
        beside.replace(self.kept)

    def _resume(self) -> None:
        state = torch.load(self.kept, weights_only=False)  # our own file, written above
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.random.bit_generator.state = state["random"]
        self.lessons.state.update(state["lessons"])


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
