"""``WeightDesk``: weights shown, tried, changed and taken back."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from ...dashboards.answers.what_if import WeightChange, WeightEffect, Weights
from ...graph.errors import ConfigError
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.policy import Policy
from ..config.config import Config
from ..config.edits import change_in_words
from ..config.reload import ConfigWatch
from ..config.sections import ScoreConfig
from ..policies.registry import new_policy
from ..questions import Questions
from ..shadows.shadow_runner import ShadowRunner
from ..times.unix_time import UnixTime
from .ranking_view import weights_view
from .weight_preview import other_weights, weight_effect

_NO_NUMBERS: Final = {"edge_types", "protected_layers"}  # of [score]

logger = logging.getLogger(__name__)


class WeightDesk:
    """What the page does with weights.

    Args:
        graph: Read under its lock, one question at a time.
        questions: Gives each question its turn.
        shadows: Get what is tried.
        watch: The configuration in force, and its file.
        unix: Turns times of the graph's clock into Unix seconds.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        questions: Questions,
        shadows: ShadowRunner,
        watch: ConfigWatch,
        unix: UnixTime,
    ) -> None:
        self._graph = graph
        self._questions = questions
        self._shadows = shadows
        self._watch = watch
        self._unix = unix

    def weights(self, written: Config | None = None) -> Weights:
        """What decides the ranking; ``written`` is what the file was just made to say."""
        return weights_view(self._watch, written, self._graph.policy, self._unix.now())

    def preview(self, change: WeightChange, engine: str | None) -> WeightEffect:
        """What a change would do."""
        score, other = self._tried(change)
        with self._questions.turn():
            effect, played = weight_effect(
                self._graph, score, engine, self._unix, self._shadows.remembered, other
            )
        return effect.model_copy(update={"window": played()})

    def try_weights(self, change: WeightChange) -> None:
        """Let a shadow have a change from now on; nothing else changes."""
        score, other = self._tried(change)
        weights = other_weights(self._graph, score, other)
        said = change_in_words(_by_section(change))
        self._shadows.weigh_otherwise(replace(weights, said=f"the weights that are tried: {said}"))
        logger.info("tried over the page, in a shadow: %s", said)

    def end_trial(self) -> None:
        """Follow no other weights any more."""
        self._shadows.weigh_alike()

    def _tried(self, change: WeightChange) -> tuple[ScoreConfig, Policy | None]:
        """What a change would make of [score]; and the policy that it names, if it is another."""
        score = self._watch.editor.tried(_by_section(change)).score
        if change.policy in (None, self._graph.policy.name):
            return score, None
        return score, new_policy(change.policy, score.weights())

    def change_weights(self, change: WeightChange) -> Weights:
        """Write a change to the configuration file, from which it takes effect within a second,
        a policy at the next start."""
        return self.weights(self._watch.editor.apply(_by_section(change), "edit"))

    def undo_weights(self) -> Weights:
        """Take the last change back."""
        return self.weights(self._watch.editor.undo("edit"))


def _by_section(change: WeightChange) -> dict[str, dict[str, Any]]:
    """A change as the file's sections have it; ConfigError where [score] names no number."""
    for name in _NO_NUMBERS & change.score.keys():
        raise ConfigError(f"score.{name} is no number: name it beside score")
    score: dict[str, Any] = dict(change.score)
    if change.protected_layers is not None:
        score["protected_layers"] = list(dict.fromkeys(change.protected_layers))  # each once
    policy = {} if change.policy is None else {"name": change.policy}
    named = {"score": score, "score.edge_types": dict(change.edge_types), "policy": policy}
    return {section: values for section, values in named.items() if values}
