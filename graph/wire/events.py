"""The messages from an engine to the sidecar about its blocks and requests, without any text.

Hashes are packed: ``bytes`` of little-endian uint64, in chain order (the parent first). Times in
messages are durations in seconds; the receiver dates arrivals with its own clock. No message
carries prompt text or token ids.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Final, NamedTuple

import msgspec

# Types of message fields, with limits that are checked when a message is decoded.

MAX_NAME = 256  # characters of any name; chosen
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Plain = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[ -~]*\Z")]  # safe in a log line
MAX_KEYS = 1 << 20  # per list; chosen
Hashes = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_KEYS)]
Hash = Annotated[int, msgspec.Meta(ge=0)]  # up to 2**64 - 1: the wire's own bound
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Total = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # counted since a start; never reached
PoolSize = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # blocks; ten times the largest pools
Listing = Annotated[bytes, msgspec.Meta(max_length=8 * 7 * (1 << 20))]  # 7.3 M keys fit a frame
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=65_535)]  # tokens
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]


class GroupKind(IntEnum):
    """The tokens whose state a KV cache group keeps."""

    OTHER = 0  # no state that a prefix match needs
    FULL = 1  # all tokens
    WINDOW = 2  # the last tokens, in a window
    CHUNK = 3  # the tokens of the same chunk
    STATE = 4  # one state, as in Mamba layers


MAX_GROUPS = 255  # of one engine; chosen
MAX_SEGMENTS = 4096  # of one request; chosen: twice what an engine states and infers
MAX_HOLD_ENDS = 64  # reasons; chosen: leaves room for those of later builds
GroupPlace = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]


class CacheGroup(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Layers that share block tables, in an engine with several KV cache groups."""

    kind: GroupKind
    window: Count  # tokens of the window or chunk; 0: neither
    block_size: BlockSize


class Event(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every engine → sidecar message."""


class EngineHello(Event, tag=1, frozen=True):
    """First message of a connection: identifies the engine."""

    engine: Name  # stable name, e.g. "host:pid"
    model: Name
    block_size: BlockSize
    num_blocks: PoolSize
    version: Name  # "vllm 0.32.0"
    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    # Hash algorithm and a digest of its initial hash, as "sha256 5be0cd19"; "": unknown.
    hashing: Plain = ""


class BlocksStored(Event, tag=2, frozen=True):
    """Full blocks that entered the prefix cache, consecutive in one chain."""

    hashes: Hashes
    parent: Hash | None  # the block before hashes[0]; None at the start of a chain
    block_size: BlockSize
    session: Name | None = None


class BlocksRemoved(Event, tag=3, frozen=True):
    """Blocks that left the prefix cache."""

    hashes: Hashes


class BlocksCleared(Event, tag=4, frozen=True):
    """The whole prefix cache was reset."""


class BlocksResident(Event, tag=5, frozen=True):
    """All blocks in the prefix cache, in answer to a resync request."""

    hashes: Listing


class Segment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The layer and importance of prompt tokens ``[start, end)``, stated or inferred."""

    layer: Annotated[int, msgspec.Meta(ge=0, le=9)]  # types.SourceLayer
    start: Count
    end: Count
    importance: Unit | None = None
    name: Name | None = None
    memory_id: Name | None = None
    authority: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1  # types.Authority: who stated it
    pinned_s: Seconds | None = None  # a lease on its blocks


class RequestStarted(Event, tag=6, frozen=True):
    """A request was scheduled for the first time."""

    request_id: Name
    hashes: Hashes  # every full block of the prompt
    prompt_tokens: Count
    cached_tokens: Count  # prompt tokens found in the prefix cache
    block_size: BlockSize
    session: Name | None = None
    tenant: Name | None = None
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()
    loading_tokens: Count = 0  # to be loaded from a colder tier, beyond ``cached_tokens``
    reads_cache: bool = True  # False: it computes its whole prompt, whatever is cached
    skipped: Count = 0  # blocks before ``hashes[0]``, left out: see ``SendTips``
    contents: Hashes = b""  # digests of the prompt up to each block's end: see ``ContentKey``
    salt: Hash = 0  # a digest of its cache salt, with ``contents``; 0: none
    waited_s: Seconds = 0.0  # since it arrived at the engine
    spliced_tokens: Count = 0  # of ``loading_tokens``, those from other positions
    same_tokens: Count = 0  # leading tokens of the first missing block that another prompt shares
    # Index in ``EngineHello.groups`` of the group that lacks its part of the first missing block,
    # although the observed group has that block; None if there is none.
    lacking: GroupPlace | None = None
    warms: bool = False  # it only warms the cache, and counts neither as hit nor as miss


CUT_AT_A_LENGTH = "finished_length_capped"  # ``RequestFinished.reason``, as vLLM has it


class RequestFinished(Event, tag=7, frozen=True):
    """A request ended; its blocks are about to be freed."""

    request_id: Name
    hashes: Hashes  # every full block, prompt and output
    prompt_tokens: Count
    total_tokens: Count
    reason: Name
    session: Name | None = None
    tenant: Name | None = None
    # False: the answer ended its turn; None: neither stated nor recognised from the answer.
    waiting_for_tool: bool | None = None
    expected_return_s: Seconds | None = None
    session_ended: bool = False
    tool: Name | None = None  # the tool that it waits for
    skipped: Count = 0  # blocks of the chain before ``hashes[0]``, left out
    ran_s: Seconds = 0.0  # since it was first scheduled; 0: unknown


class SessionSignal(Event, tag=8, frozen=True):
    """A client's statement about a session, made outside any request."""

    session: Name
    tenant: Name | None = None
    waiting_for_tool: bool | None = None  # as in ``RequestFinished``
    expected_return_s: Seconds | None = None
    ended: bool = False
    tool: Name | None = None


class BlocksAttended(Event, tag=9, frozen=True):
    """Blocks that one sampled decode step attended to, with their softmax mass."""

    hashes: Hashes
    mass: Annotated[bytes, msgspec.Meta(max_length=4 << 20)]  # little-endian float32, one per hash


class ConfidenceSampled(Event, tag=10, frozen=True):
    """The model's confidence while it wrote the tokens of these blocks."""

    hashes: Hashes
    confidence: Unit
    request_id: Name = ""  # the request whose answer it is
    session: Name | None = None
    tenant: Name | None = None


class BlocksEmbedded(Event, tag=11, frozen=True):
    """Key embeddings: float16 rows, one per hash."""

    hashes: Hashes
    dim: Annotated[int, msgspec.Meta(ge=2, le=4096)]
    vectors: Annotated[bytes, msgspec.Meta(max_length=64 << 20)]


class BlocksSpilled(Event, tag=12, frozen=True):
    """Blocks whose copy in a colder tier was completed."""

    hashes: Hashes
    tier: Annotated[int, msgspec.Meta(ge=2, le=8)]  # types.Tier.WARM, COLD or POOL
    bytes_per_block: Count


class BlocksLoaded(Event, tag=13, frozen=True):
    """Blocks that were loaded back from a colder tier into the pool."""

    hashes: Hashes


class CopiesDropped(Event, tag=14, frozen=True):
    """Blocks whose copy in a colder tier is gone."""

    hashes: Hashes
    tier: Annotated[int, msgspec.Meta(ge=2, le=8)]
    cause: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0  # logs.reasons.Cause


class Pressure(Event, tag=15, frozen=True):
    """The engine's load, sent about twice a second; doubles as its heartbeat."""

    total_blocks: Count
    free_blocks: Count  # allocatable: never used, or cached and unreferenced
    cached_blocks: Count  # blocks with a prefix-cache hash
    running: Count
    waiting: Count
    prefill_tokens_per_s: Rate = 0.0  # measured; 0 before the first measurement


class AdviceApplied(Event, tag=16, frozen=True):
    """What the engine did with rankings; counts run from the engine's start."""

    epoch: Total  # the last ranking applied
    moved: Total  # blocks moved in the free queue
    recycled: Total  # ranked blocks left alone: evicted, reused or referenced by then
    stale: Total  # steps without a fresh ranking
    protected_evicted: Total  # protected blocks that the engine evicted anyway
    dropped: Total  # events dropped because our queue was full


class TierReport(Event, tag=17, frozen=True):
    """What the colder tiers hold and did; counts run from the engine's start."""

    bytes_per_block: Count  # on one worker
    warm_blocks: Count
    warm_capacity: Count
    cold_blocks: Count
    cold_capacity: Count
    spilled: Total  # copies completed
    spill_lost: Total  # overwritten before the copy was complete: discarded
    spill_failed: Total
    passed_over: Total  # blocks about to be evicted that were not worth a copy
    demoted: Total  # moved on from WARM to COLD
    dropped: Total  # copies dropped for lack of room
    loaded: Total  # blocks loaded for a request that waited for them
    load_failed: Total
    stalls: Total  # requests that waited for a load, their own or a running one
    stall_s: Seconds  # how long they waited in total
    recomputed: Total  # blocks in a colder tier that were faster to compute again
    prefetched: Total  # blocks loaded before any request asked for them
    prefetch_useful: Total  # of these, blocks that a request then hit
    prefetch_wasted: Total  # of these, blocks evicted unused
    prefetch_cancelled: Total  # requested, but not started for lack of room
    load_bytes_per_s: Rate
    spill_bytes_per_s: Rate
    prefill_tokens_per_s: Rate
    shared: Total = 0  # blocks given to the shared store, or already there
    share_failed: Total = 0
    store_loaded: Total = 0  # of the loaded blocks, those from the shared store
    store_failed: Total = 0  # blocks listed by the store but not returned intact
    reads_store: bool = False  # whether there is a shared store that the engine reads


class RequestHeld(Event, tag=18, frozen=True):
    """A request of a new or cold session waits until its context has room."""

    request_id: Name
    blocks: Count  # blocks of context that the pool does not hold yet
    session: Name | None = None
    tenant: Name | None = None
    fitting: Count = 0  # sessions that fit, by the advice that held it; 0: unknown
    live: Count = 0  # live sessions, by the same advice


class RequestReleased(Event, tag=19, frozen=True):
    """A held request may start, for one of the reasons in ``HOLD_ENDS``."""

    request_id: Name
    waited_s: Seconds
    reason: Name


class AdmissionReport(Event, tag=20, frozen=True):
    """What the engine is holding and has held.

    Counts run from its start, except the first three and the last three.
    """

    waiting: Count  # requests that are held now
    waiting_blocks: Total  # blocks that they need
    oldest_s: Seconds  # how long the first of them has waited
    held: Total
    # Releases by reason, in the order of ``HOLD_ENDS``.
    released: Annotated[tuple[Total, ...], msgspec.Meta(max_length=MAX_HOLD_ENDS)]
    waited_s: Seconds  # total waiting time
    longest_s: Seconds
    not_held: Total  # requests that started without being held
    queued_share: Unit = 0.0  # share of recent requests that found others in the engine's queue
    # While nothing is held and many requests queue: blocks of the first prompts in the engine's
    # queue, and of these, blocks computed for their sessions' last turns and evicted since.
    queued_blocks: Count = 0
    queued_again: Count = 0


HOLD_ENDS = ("room", "bound", "idle", "open", "silence", "gone", "patience")
"""Why a held request was released: there was room; it reached the limit; the engine was idle;
admission opened for all; the sidecar fell silent; its client disconnected; it had been patient and
no other request was queued. On the wire a reason is its index here, so new ones are appended.
"""

AnyEvent = (
    EngineHello
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | BlocksResident
    | RequestStarted
    | RequestFinished
    | SessionSignal
    | BlocksAttended
    | ConfidenceSampled
    | BlocksEmbedded
    | BlocksSpilled
    | BlocksLoaded
    | CopiesDropped
    | Pressure
    | AdviceApplied
    | TierReport
    | RequestHeld
    | RequestReleased
    | AdmissionReport
)


RESIDENCY: tuple[type[Event], ...] = (
    EngineHello, BlocksStored, BlocksRemoved, BlocksCleared, BlocksResident, BlocksSpilled,
    BlocksLoaded, CopiesDropped,
)  # fmt: skip
"""Kinds of events that report where blocks are: if one is lost, the graph is wrong until a
resync.
"""

KINDS: dict[int, type[Event]] = {
    kind.__struct_config__.tag: kind for kind in typing.get_args(AnyEvent)
}
"""Wire tag → kind."""

MAX_EVENTS = 65_536  # per batch; chosen


class Unreadable(Event, tag=0, frozen=True):
    """Stands for an event of unreadable kind in a refusal; never sent."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The payload of one frame."""

    events: Annotated[list[AnyEvent], msgspec.Meta(max_length=MAX_EVENTS)]


# Engines that hash blocks differently cannot find each other's blocks.

REMEDY: Final = (
    "Start them with one --block-size, one --prefix-caching-hash-algo and one PYTHONHASHSEED "
    "(xxhash: it must be set)."
)
_NAMED: Final = 3  # engines named per kind of hashing; chosen


class BlockHashing(NamedTuple):
    """How an engine hashes blocks, as ``hashing_of`` describes it."""

    engine: str
    model: str
    told: str


def hashing_of(hello: EngineHello) -> str:
    """Describe how an engine hashes blocks; empty if it does not report it."""
    return f"blocks of {hello.block_size} tokens, {hello.hashing}" if hello.hashing else ""


def disagreements(engines: Iterable[BlockHashing]) -> list[str]:
    """Return one sentence for each model whose engines hash blocks differently. An engine that does
    not report how it hashes agrees with all.
    """
    kinds: dict[str, dict[str, list[str]]] = {}
    for each in engines:
        if each.told:
            kinds.setdefault(each.model, {}).setdefault(each.told, []).append(each.engine)
    return [_sentence(model, those) for model, those in kinds.items() if len(those) > 1]


def _sentence(model: str, kinds: dict[str, list[str]]) -> str:
    told = "; ".join(f"{_names(engines)}: {kind}" for kind, engines in kinds.items())
    return (
        f"Engines of {model!r} hash blocks differently ({told}): they find nothing of each "
        "other's, nor in a store that they share."
    )


def _names(engines: list[str]) -> str:
    more = len(engines) - _NAMED
    return ", ".join(map(repr, engines[:_NAMED])) + (f" and {more} more" if more > 0 else "")
