"""``/v1/sampled``: where the model looks, and how sure it is, as sampled decode steps told."""

from __future__ import annotations

from .answer import Answer, Part


class LayerLooks(Part):
    """What the blocks of one source layer get.

    Attributes:
        blocks: Blocks of the layer that were sampled.
        attention: Their share of all the attention that was sampled, from 0 to 1.
    """

    layer: str
    blocks: int
    attention: float


class LookedAt(Part):
    """One block that is looked at.

    Attributes:
        session: The last that asked for it; None where nobody knows.
        identity: The segment that it is part of, where a request named it.
        attention: A running mean of its share of the attention in the samples that it was in.
        importance: What it is worth, from 0 to 1; much attention raises it where nobody stated it.
        in_pool: Whether an engine's pool holds it.
    """

    key: str
    layer: str
    session: str | None
    identity: str | None
    attention: float
    importance: float
    in_pool: bool


class SureOf(Part):
    """How sure the model is of what it writes to one session.

    Attributes:
        confidence: A running mean, from 0 to 1; no probability of being right.
    """

    session: str
    tenant: str | None
    state: str
    confidence: float


class Sampled(Answer):
    """What sampling found; all of it empty where no engine samples.

    Attributes:
        layers: In the order of the layers' authority, those that were sampled.
        blocks: The most attended, most first.
        sessions: The least sure first.
        confidence: The mean over all sampled sessions; None where none was.
        edges: How many edges samples made, by type.
    """

    layers: list[LayerLooks]
    blocks: list[LookedAt]
    sessions: list[SureOf]
    confidence: float | None
    edges: dict[str, int]
