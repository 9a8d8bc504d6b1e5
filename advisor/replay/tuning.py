"""`kvgraph tune`: searches the score's weights on a trace's first part, and reports on the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...graph.ranking.formulas import ClassicPolicy, LruPolicy
from ...graph.ranking.policy import ScoreProfile
from ...graph.types import EdgeType
from ..policies.registry import DEFAULT
from .arms import Settings, run_arm
from .trace import ReplayError, Trace

# name: (lowest, highest); all on a log scale, with the sign that the weight has in the score.
SPACE: Final[dict[str, tuple[float, float]]] = {
    "age": (1e-4, 1.0),
    "degree": (-20.0, -0.01),
    "edge_weight": (-20.0, -0.01),
    "hit_count": (-50.0, -0.01),
    "session_credit": (-500.0, -0.1),
    "session_memory_s": (30.0, 3000.0),
    "edge_types.prefix_share": (0.01, 10.0),
    "edge_types.temporal": (0.001, 2.0),
}
"""The ranges searched: weights, weights of the edge types that a trace has, and the horizon."""

ARM: Final = ClassicPolicy.name
OTHERS: Final = (LruPolicy.name, DEFAULT)
"""Arms without weights, for comparison: stock, and the policy that learns while it runs."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of a search."""

    weights: dict[str, float]  # by the names of ``SPACE``
    trained: float  # mean hit rate on the part that was searched
    # Arm → capacity → hit rate over the requests that the search never saw, the cache filled by
    # those before them.
    untouched: dict[str, dict[int, float]]
    trials: int

    def as_dict(self) -> dict[str, Any]:
        rates = {
            arm: {str(capacity): round(rate, 6) for capacity, rate in row.items()}
            for arm, row in self.untouched.items()
        }
        return {
            "weights": self.weights,
            "trained": round(self.trained, 6),
            "untouched": rates,
            "trials": self.trials,
        }


def tune(
    trace: Trace,
    capacities: Sequence[int],
    *,
    train: float,
    trials: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuning:
    """Search with optuna's TPE sampler; the same seed finds the same weights.

    Raises ReplayError.
    """
    if not 0 < train < 1:
        raise ReplayError(f"--train {train}: allowed: a share between 0 and 1")
    first = trace.head(train)

    def merit(weights: Mapping[str, float]) -> float:
        return _mean_rate(first, weights, capacities)

    weights, trained = _search(merit, trials, seed, progress)
    tuned = Settings(profile=profile_of(weights))
    rows = {arm: (arm, Settings()) for arm in OTHERS}
    rows |= {f"{ARM}, defaults": (ARM, Settings()), f"{ARM}, tuned": (ARM, tuned)}
    untouched = {
        name: _later_rates(arm, trace, len(first), capacities, settings)
        for name, (arm, settings) in rows.items()
    }
    return Tuning(weights, trained, untouched, trials)


def profile_of(weights: Mapping[str, float]) -> ScoreProfile:
    """Return the profile with these weights; weights that are not named keep their defaults."""
    default = ScoreProfile()
    plain = {name: value for name, value in weights.items() if "." not in name}
    edges = {
        kind: weights.get(f"edge_types.{kind.name.lower()}", value)
        for kind, value in default.edge_types.items()
    }
    return ScoreProfile(**plain, edge_types=edges)  # type: ignore[arg-type]


def write_toml(weights: Mapping[str, float], path: Path, comment: str) -> None:
    """Save the weights as a configuration file that a sidecar loads."""
    plain = [f"{name} = {value!r}" for name, value in weights.items() if "." not in name]
    edges = [
        f"{name.removeprefix('edge_types.')} = {value!r}"
        for name, value in weights.items()
        if "." in name
    ]
    lines = [f"# {comment}", "", "[score]", *plain, "", "[score.edge_types]", *edges, ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _search(
    merit: Callable[[Mapping[str, float]], float],
    trials: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, float], float]:
    try:
        import optuna
    except ImportError:
        raise ReplayError("tuning needs optuna: pip install 'kvgraph[replay]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial({name: math.log(abs(value)) for name, value in _defaults().items()})

    def objective(trial: Any) -> float:
        return merit({name: _draw(trial, name) for name in SPACE})

    study.optimize(
        objective, n_trials=trials, callbacks=[lambda _, trial: progress(trial.number + 1, trials)]
    )
    best = {name: _signed(name, value) for name, value in study.best_params.items()}
    return best, float(study.best_value)


def _draw(trial: Any, name: str) -> float:
    low, high = sorted(map(abs, SPACE[name]))
    return _signed(name, trial.suggest_float(name, math.log(low), math.log(high)))


def _signed(name: str, logarithm: float) -> float:
    value = math.copysign(math.exp(logarithm), SPACE[name][0])
    return float(f"{value:.6g}")


def _defaults() -> dict[str, float]:
    default = ScoreProfile()
    return {
        name: default.edge_types[EdgeType[name.split(".")[1].upper()]]
        if "." in name
        else getattr(default, name)
        for name in SPACE
    }


def _mean_rate(trace: Trace, weights: Mapping[str, float], capacities: Sequence[int]) -> float:
    settings = Settings(profile=profile_of(weights))
    rates = [run_arm(ARM, trace, capacity, settings).sum() for capacity in capacities]
    return float(sum(rates) / len(rates) / max(1, trace.prompt_blocks))


def _later_rates(
    arm: str, trace: Trace, seen: int, capacities: Sequence[int], settings: Settings
) -> dict[int, float]:
    total = max(1, int(trace.prompts[seen:].sum()))
    return {
        capacity: float(run_arm(arm, trace, capacity, settings)[seen:].sum() / total)
        for capacity in capacities
    }
