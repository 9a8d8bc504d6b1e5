"""Do running engines hash blocks alike? Asks this user's sidecars."""

from __future__ import annotations

from http.client import HTTPException

from ...graph.ipc.runtime import RunningSidecar, running_sidecars
from ...graph.messages.block_hashing import REMEDY, BlockHashing, disagreements
from ..sidecar_answer import answer_of
from .environment import Check


def check_hashing() -> Check:
    """Can running engines of one model find what the others computed, as in a shared store."""
    told = [each for sidecar in running_sidecars() for each in told_by(sidecar) if each.told]
    if not told:
        return Check("block hashes", None, "no running engine says how it hashes blocks")
    if wrong := disagreements(told):
        return Check("block hashes", True, " ".join(wrong), REMEDY)
    kinds = "; ".join(sorted({each.told for each in told}))
    return Check("block hashes", True, f"engines of one model hash them alike: {kinds}")


def told_by(sidecar: RunningSidecar) -> list[BlockHashing]:
    """What the engines of a sidecar say; nothing where it does not answer."""
    try:
        engines = answer_of(sidecar, "/status")["engines"]
        return [BlockHashing(each["name"], each["model"], each["hashing"]) for each in engines]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return []
