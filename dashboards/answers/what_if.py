"""``/v1/shadows`` and ``/v1/weights``: what else could rank, and what it would find."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .answer import Answer, Part


class ShadowView(Part):
    """What a pool would have found under another policy or size, from the same requests.

    Attributes:
        name: What it is called; ``ours`` is the live pool, ``belady`` the ceiling.
        sentence: The same in words.
        policy: Who ranks there.
        capacity: Its size beside the live pool's: 1.0, 0.75, 1.25 or 2.0, or with tiers.
        tiers: Whether copies in colder tiers count: as so many blocks more. ``ours`` has what the
            engine has.
        blocks: Its size, of the whole pool.
        asked, found: Blocks of the sampled requests: of those that the ceiling is of, while that is
            known, and else of all.
        hit_rate: What they say all these requests would find; None before any. The ceiling's is
            never below that of a pool with no more room.
        ours: What the live engine found of the same requests, in its pool or loaded from its tiers.
        history: Hit rates by step, the oldest first; None where nothing was asked.
    """

    name: str
    sentence: str
    policy: str
    capacity: float
    tiers: bool
    blocks: int
    asked: int
    found: int
    hit_rate: float | None
    ours: float | None
    history: list[float | None]


class Shadows(Answer):
    """Shadows of one engine, ``ours`` first.

    Attributes:
        guard: Who ranks the engine's blocks and by how much, as its guard's own shadow says; None
            without an engine.
        sampled_share: Of sessions, that shadows follow, chosen by a hash of their names.
        sessions: How many these were so far.
        ranked_every_s: How often policies' shadows rank; seldom where that takes too long.
    """

    engine: str | None
    engines: list[str]
    guard: str | None
    sampled_share: float
    sessions: int
    ranked_every_s: float
    step_s: float
    starts: list[float]
    shadows: list[ShadowView]


class Weights(Answer):
    """What decides the ranking, as configured; keys are those of the configuration file.

    Attributes:
        policy, next_policy: The one that ranks, and the one that does from the next start on.
        policies: All that there are.
        heeds: Which weights the policy that ranks heeds, in words; None where nobody knows.
        score: [score]'s numbers by name.
        defaults: The same, as they are without configuration.
        meanings: What each number is, and each type of edge, in words.
        file: Where changes are kept; None: nowhere.
        is_editable: Whether this sidecar writes changes; ``why_not`` says why it does not. They can
            be previewed and tried in any case.
        undoable: How many changes can be taken back.
    """

    policy: str
    next_policy: str
    heeds: str | None
    policies: list[str]
    guard: bool
    score: dict[str, float]
    edge_types: dict[str, float]
    protected_layers: list[str]
    defaults: dict[str, float]
    edge_type_defaults: dict[str, float]
    meanings: dict[str, str]
    layers: list[str]
    file: str | None
    is_editable: bool
    why_not: str | None
    undoable: int


class WeightChange(Part):
    """What to change of the weights; what is not named stays.

    Attributes:
        score: Of [score], by name: the numbers that ``Weights.score`` has.
        edge_types: Of [score.edge_types].
        protected_layers: All of them; None: as they are.
        policy: One of ``Weights.policies``, from the next start on; None: as it is.
    """

    score: dict[str, float] = Field(default_factory=dict)
    edge_types: dict[str, float] = Field(default_factory=dict)
    protected_layers: list[str] | None = None
    policy: Annotated[str, Field(max_length=64)] | None = None


class Mover(Part):
    """A block that a change moves: ``now`` and ``then`` are its places, None beyond the list."""

    key: str
    layer: str
    session: str | None
    now: int | None
    then: int | None


class WindowEffect(Part):
    """The remembered requests, played again with every block's score as it is now.

    Attributes:
        sentence: The same in words.
        requests, asked: Requests, and their blocks.
        found_now, found_then: Blocks found with the present weights, and with the others.
    """

    sentence: str
    requests: int
    asked: int
    found_now: int
    found_then: int


class WeightEffect(Answer):
    """What a change would do to an engine's ranking, before it is made.

    Attributes:
        sentence: The same in words.
        looked_at: Blocks in both lists: those to go first.
        entering: Of these: only after the change.
        movers: The blocks that move furthest.
        window: On the remembered requests; None where none are.
    """

    engine: str | None
    sentence: str
    looked_at: int
    entering: int
    movers: list[Mover]
    window: WindowEffect | None
