"""What a run of a fault leaves on disk: its figures, and when, where and how they were measured."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..figures import Figure, Figures, machine


@dataclass(frozen=True, slots=True)
class Record:
    """One fault's result, and the machine's load averages over 1 and 5 minutes when it ended: who
    else was busy.
    """

    command: str
    date: str
    device: str
    load: tuple[float, float]
    seconds: float
    full: bool
    seed: int
    figures: dict[str, Any]

    @classmethod
    def of(cls, figures: Figures, full: bool, seed: int, seconds: float) -> Record:
        rows = {
            name: figure.as_dict() | {"target": figure.target}
            for name, figure in figures.figures.items()
        }
        command = f"kvgraph bench faults {figures.bench} --seed {seed}" + " --full" * full
        one, five, _ = os.getloadavg()
        now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        load = (round(one, 1), round(five, 1))
        return cls(command, now, machine(), load, round(seconds, 1), full, seed, rows)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Record | None:
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def figures_again(self) -> dict[str, Figure]:
        return {
            name: Figure(
                row["value"], row["unit"], tuple(row["spread"]), row["n"], row.get("target", "")
            )
            for name, row in self.figures.items()
        }


def write_all(records: dict[str, Record], path: Path) -> None:
    whole = {name: asdict(record) for name, record in records.items()}
    path.write_text(json.dumps({"bench": "faults", "faults": whole}, indent=1) + "\n")
