"""Frames and the three shapes of vLLM's KV events: what is meant is read, the rest refused."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from kvgraph.graph.errors import WireError
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.advice import AdmissionAdvice, EvictionRanking, ResyncRequest
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    EngineHello,
    RequestStarted,
    Segment,
)
from kvgraph.graph.wire.kv_events import MOST_EVENTS, MOST_HASHES, KvEventDecoder
from wire_keys import pack

EVENTS = [
    EngineHello("host:1", "llama", 16, 100, "vllm 0.32.0", hashing="sha256 5be0cd19"),
    BlocksStored(b"\1" * 16, 2**64 - 1, 16, "s"),
    BlocksRemoved(b"\2" * 8),
    BlocksCleared(),
    RequestStarted("r", b"\3" * 8, 20, 16, 16, "s", "t", (Segment(2, 0, 16, 0.5, "policy", "m"),)),
]
encode = msgspec.msgpack.encode


def events_of(batch: list[Any]) -> wire.EventMessage:
    return wire.decode_events([wire.HEADER, b"\0" * 8, encode([batch])])


def test_events_and_advice_survive_the_wire() -> None:
    assert wire.decode_events(wire.encode_events(7, EVENTS)) == wire.EventMessage(7, EVENTS)
    for advice in (
        ResyncRequest("gap"),
        AdmissionAdvice(9, 7.75, 480, 38, 31, again=0.25),
        AdmissionAdvice(9, 7.75, None, 3, 31),
    ):
        assert wire.decode_advice(wire.encode_advice(1, advice, now=8.0), now=8.0) == (1, advice)


def test_a_ranking_is_sent_with_its_age_and_without_what_an_engine_looked_up() -> None:
    held = EvictionRanking(
        3, 7.75, as_keys([1, 2]), as_keys([9]), as_keys([2]), as_keys([5]), 5.0, 4, 12,
        order_blocks=as_keys([7, 8]), spill_keys=as_keys([2]), protected_places={9: 0},
    )  # fmt: skip
    frames = wire.encode_advice(1, held, now=8.0)
    assert frames[2] == encode([1, 3, 0.25, pack(1, 2), pack(9), pack(2), pack(5), 4, 12])
    _, sent = wire.decode_advice(frames, now=100.0)
    assert isinstance(sent, EvictionRanking)
    assert (sent.epoch, sent.ts, sent.heard, sent.known_of) == (3, 99.75, 4, math.inf)
    assert sent.may_keep == 12
    blocks = sent.order, sent.protected, sent.spill_first, sent.demote_first
    assert [keys.tolist() for keys in blocks] == [[1, 2], [9], [2], [5]]
    looked_up = sent.order_blocks, sent.spill_blocks, sent.spill_keys, sent.protected_places
    assert looked_up == (None, None, None, None)


def test_rankings_and_hellos_of_older_and_newer_builds_are_understood() -> None:
    for sent in (
        [1, 3, 0.0, pack(1), b"", b""],
        [1, 3, 0.0, pack(1), b"", b"", b"", 4, 12, "more"],
    ):
        _, ranking = wire.decode_advice([wire.HEADER, bytes(8), encode(sent)], now=0.0)
        assert isinstance(ranking, EvictionRanking)
        assert (ranking.order.tolist(), ranking.demote_first.tolist()) == ([1], [])
    old, new = [1, "e", "m", 16, 100, "v"], [1, "e", "m", 16, 100, "v", [], "sha256 5be0", "more"]
    plain = EngineHello("e", "m", 16, 100, "v")
    assert plain.hashing == ""
    assert events_of([old, new]).events == [
        plain,
        msgspec.structs.replace(plain, hashing="sha256 5be0"),
    ]


@pytest.mark.parametrize("epoch", [-1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("rest", [[0.0, b"", b"", b""], [0.0]])
def test_a_number_of_a_ranking_that_no_engine_could_report_is_refused(
    epoch: int, rest: list[Any]
) -> None:
    tag = 1 if len(rest) > 1 else 2
    assert wire.decode_advice([wire.HEADER, b"\0" * 8, encode([tag, 2**63 - 1, *rest])], now=0.0)
    with pytest.raises(WireError, match="advice refused"):
        wire.decode_advice([wire.HEADER, b"\0" * 8, encode([tag, epoch, *rest])], now=0.0)


@pytest.mark.parametrize(
    "room",
    [
        [6, 1, 0.0, -1, 0, 0], [6, 1, 0.0, 2**31, 0, 0], [6, 1, 0.0, 1.5, 0, 0],
        [6, 1, 0.0, "all", 0, 0], [6, 1, -1.0, 1, 0, 0], [6, 1, float("nan"), 1, 0, 0],
        [6, 1, 0.0, 1, -1, 0], [6, 1, 0.0, 1, 0, None], [6, 1, 0.0], [6, -1, 0.0, 1, 0, 0],
    ],
)  # fmt: skip
def test_room_out_of_range_is_refused(room: list[Any]) -> None:
    with pytest.raises(WireError, match="advice refused"):
        wire.decode_advice([wire.HEADER, b"\0" * 8, encode(room)], now=0.0)


PROMPT, ENDED = (
    [6, "r", pack(1), 16, 0, 16, None, None],
    [7, "r", pack(1), 16, 16, "stop", None, None],
)


@pytest.mark.parametrize(
    ("event", "field", "torn"),
    [
        ([2, pack(1), None, 0], "BlocksStored.block_size", True),
        ([2, pack(1), None, -16], "BlocksStored.block_size", True),
        ([2, pack(1), None, 2**31], "BlocksStored.block_size", True),
        ([2, pack(1), -1, 16], "BlocksStored.parent", True),
        ([2, 7, None, 16], "BlocksStored.hashes", True),
        ([1, "e" * 300, "m", 16, 100, "v"], "EngineHello.engine", True),
        ([1, "e", "m", 16, 2**31 - 1, "v"], "EngineHello.num_blocks", True),
        ([1, "e", "m", 16, 9, "v", [], "sha256\nERROR"], "EngineHello.hashing", True),
        ([*PROMPT, [[2, 0, 16, float("nan")]]], "RequestStarted.segments[0].importance", False),
        ([*PROMPT, [[2, 0, 16]] * 4097], "RequestStarted.segments", False),
        ([*ENDED, True, float("inf")], "RequestFinished.expected_return_s", False),
        ([20, 0, 0, 0, 0, [0] * 65, 0, 0, 0], "AdmissionReport.released", False),
        ([16, 0, 2**63, 0, 0, 0, 0], "AdviceApplied.moved", False),
        ([10, pack(1), float("nan")], "ConfidenceSampled.confidence", False),
        (["BlocksStored", pack(1)], "Unreadable", True),
        ([], "Unreadable", True),
    ],
)
def test_an_event_out_of_range_is_refused_by_name_and_alone(
    event: list[Any], field: str, torn: bool
) -> None:
    message = events_of([event, [4]])
    assert message.events == [BlocksCleared()]
    assert message.refused.startswith(f"{field}: ")
    assert message.torn is torn
    assert message.unknown == 0


@pytest.mark.parametrize("depth", [900, 100_000])
def test_deep_nesting_is_refused_on_a_small_stack_too(depth: int) -> None:
    found: list[wire.EventMessage] = []
    payloads = [b"\x91" * depth, b"\x91\x91" + b"\x91" * depth]
    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(
            target=lambda: found.extend(
                wire.decode_events([wire.HEADER, b"\0" * 8, each]) for each in payloads
            )
        )
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [(message.events, bool(message.refused)) for message in found] == [([], True)] * 2


def test_mutants_of_good_messages_are_read_or_refused_never_worse() -> None:
    seed = 20
    rng, payload = random.Random(seed), wire.encode_events(1, EVENTS)[2]
    for _ in range(20_000):
        mutant = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        with contextlib.suppress(WireError):
            wire.decode_events([wire.HEADER, b"\0" * 8, bytes(mutant)])


STORED = {
    "type": "BlockStored", "block_hashes": [1, 2**64 - 1], "parent_block_hash": 9,
    "token_ids": [5, 6], "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None,
    "extra_keys": [["secret salt"], None], "session_id": "s",
}  # fmt: skip
REMOVED = {"type": "BlockRemoved", "block_hashes": [3], "medium": None}
CLEARED = {"type": "AllBlocksCleared"}
OURS = [BlocksStored(pack(1, 2**64 - 1), 9, 16, "s"), BlocksRemoved(pack(3)), BlocksCleared()]
ARRAYS = [
    ["BlockStored", [1, 2**64 - 1], 9, [5, 6], 16, None, "GPU"],
    ["BlockRemoved", [3]],
    ["AllBlocksCleared"],
]


def test_the_three_shapes_of_a_batch() -> None:
    maps = [STORED, REMOVED, CLEARED]
    without_session = [BlocksStored(pack(1, 2**64 - 1), 9, 16), *OURS[1:]]
    for batch, expected in (
        ([1.5, maps, 0], OURS),
        ({"ts": 1.5, "events": maps}, OURS),
        ([1.5, ARRAYS], without_session),
    ):
        decoder = KvEventDecoder()
        frames = [b"topic", b"\0" * 7 + b"\5", encode(batch)]
        assert decoder.decode(frames) == (5, expected)
        assert decoder.decode(frames) == (5, expected)


def test_a_publisher_keeps_the_shape_of_its_first_good_batch() -> None:
    decoder = KvEventDecoder()
    decoder.decode_payload(encode([1.5, [STORED]]))
    assert decoder.decode_payload(encode([1.5, ARRAYS])) == []
    assert decoder.left_out == len(ARRAYS)
    with pytest.raises(WireError):
        decoder.decode_payload(encode({"events": 7}))


def decoded(*events: dict[str, Any]) -> list[Any]:
    return KvEventDecoder().decode_payload(encode([1.5, events]))


KEYS = pack(1, 2**64 - 1)
LONG, DIGITS = b"\xaa" * 24 + (77).to_bytes(8, "big"), b"12345678"
OF_DIGITS = int.from_bytes(DIGITS, "big")
READ: dict[str, tuple[dict[str, Any], object]] = {
    "hashes in bytes are their low 64 bits": (
        {"block_hashes": [LONG]}, BlocksStored(pack(77), 9, 16, "s")
    ),
    "digits are bytes": (
        {"block_hashes": [DIGITS, 5]}, BlocksStored(pack(OF_DIGITS, 5), 9, 16, "s")
    ),
    "digits behind a number": (
        {"block_hashes": [5, DIGITS]}, BlocksStored(pack(5, OF_DIGITS), 9, 16, "s")
    ),
    "signed hashes are the same 64 bits": (
        {"block_hashes": [-5, 7, -(2**63)], "parent_block_hash": -1},
        BlocksStored(pack(2**64 - 5, 7, 2**63), 2**64 - 1, 16, "s"),
    ),
    "signed hashes that are removed": (
        {**REMOVED, "block_hashes": [-5, 2**64 - 5]}, BlocksRemoved(pack(2**64 - 5, 2**64 - 5))
    ),
    "a session that is a number costs no block": (
        {"session_id": 7}, BlocksStored(KEYS, 9, 16, None)
    ),
}  # fmt: skip
"""What differs from ``STORED``, and what is read."""


@pytest.mark.parametrize(("change", "told"), READ.values(), ids=READ)
def test_an_event_is_read_for_what_it_means(change: dict[str, Any], told: object) -> None:
    assert decoded({**STORED, **change}, STORED, REMOVED) == [told, *OURS[:2]]
    assert "salt" not in repr(told), "no token and no salt gets past the decoder"


def test_a_copy_need_not_say_more_than_its_hash() -> None:
    """vLLM's OffloadingConnector tells copies without their size, tokens and parent."""
    copy = {**STORED, "medium": "CPU", "block_size": 0, "token_ids": [], "parent_block_hash": None}
    bare = {name: copy[name] for name in ("type", "block_hashes", "medium")}
    for told in (copy, bare, {**copy, "block_size": None}):
        assert decoded(told, STORED, REMOVED) == [BlocksSpilled(KEYS, 2, 0), *OURS[:2]]


def test_odd_events_cost_each_as_much_as_one() -> None:
    """Kinds that are not known, and events that are torn, in one batch of one publisher."""

    def cost(count: int) -> float:
        decoder = KvEventDecoder()
        decoder.decode_payload(encode([1.5, [STORED]]))
        new = [{"type": f"New{number}"} for number in range(count)]
        torn = [{**STORED, "block_hashes": "x", "block_size": number} for number in range(count)]
        payload, took = encode([1.5, [*new, *torn]]), []
        for _ in range(3):
            began = time.thread_time()
            decoder.read_payload(payload)
            took.append(time.thread_time() - began)
        assert decoder.left_out == 6 * count
        return min(took)

    assert cost(8000) < 24 * cost(1000), "eight times as many"


@pytest.mark.parametrize("event", [b"\xc0", b"\x80", b"\x90"])
def test_a_batch_of_bytes_that_are_no_events_is_refused_at_once(event: bytes) -> None:
    """Each took two microseconds, so that a frame held everybody's advice up for minutes."""
    for count, taken in ((MOST_EVENTS, True), (MOST_EVENTS + 1, False)):
        payload = b"\x92\x00\xdd" + count.to_bytes(4, "big") + event * count
        decoder = KvEventDecoder()
        if taken:
            assert decoder.decode_payload(payload) == []
            assert decoder.left_out == count
        else:
            with pytest.raises(WireError, match="length"):
                decoder.decode_payload(payload)


def test_a_batch_has_no_more_hashes_than_are_read_in_a_second() -> None:
    """Hashes of one byte: sixty times as many as a frame has of those that engines send."""
    half = {**REMOVED, "block_hashes": [1] * (MOST_HASHES // 2)}
    decoder = KvEventDecoder()
    assert len(decoder.decode_payload(encode([1.5, [half, half, CLEARED]]))) == 3
    assert (decoder.left_out, decoder.torn) == (0, False)
    translated = decoder.decode_payload(encode([1.5, [half, half, REMOVED, CLEARED]]))
    assert len(translated) == 2
    assert (decoder.left_out, decoder.torn) == (1, True)
    whole = {**REMOVED, "block_hashes": [1] * (MOST_HASHES + 1)}
    assert decoder.decode_payload(encode([1.5, [whole, REMOVED]])) == [OURS[1]]
    assert decoder.left_out == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": -16}, "block_size"),
        ({"block_size": 2**31}, "block_size"),
        ({"block_hashes": ["x"]}, "block_hashes"),
        ({"parent_block_hash": "x"}, "parent_block_hash"),
        ({"block_hashes": None}, "block_hashes"),
        ({"medium": 7}, "medium"),
        ({"medium": "tape"}, "tape"),
        ({"group_idx": "x"}, "group_idx"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["later", "first"])
def test_an_event_that_means_nothing_costs_only_itself(
    change: dict[str, Any], named: str, known: bool
) -> None:
    decoder, bad = KvEventDecoder(), {**STORED, **change}
    if known:
        assert decoder.decode_payload(encode([1.5, [STORED]]))
    assert decoder.decode_payload(encode([1.5, [bad]])) == [], "alone in its batch"
    assert decoder.decode_payload(encode([1.5, [STORED, bad, REMOVED, bad]])) == OURS[:2]
    assert decoder.left_out == 3
    assert named in decoder.last_left_out
    assert decoder.torn == (known is False or change.get("medium") != "tape")


def test_storage_that_is_not_the_engines_own_is_a_shared_store() -> None:
    """vLLM's tiers of files and of objects both tell ``STORAGE``, and where it lies."""
    for locality, tier in ((None, 4), ("LOCAL", 4), ("REMOTE", 8)):
        place = {"medium": "STORAGE", "locality": locality}
        events = decoded({**STORED, **place}, {**REMOVED, **place})
        assert events == [BlocksSpilled(KEYS, tier, 0), CopiesDropped(pack(3), tier)]
    assert decoded({**STORED, "locality": "REMOTE"}) == OURS[:1]


@pytest.mark.parametrize("ts", [None, "2026-11-29", [], {"at": 1.5}, 1 << 63])
@pytest.mark.parametrize("known", [True, False], ids=["later", "first"])
def test_a_batchs_time_costs_no_events_whatever_it_is(ts: object, known: bool) -> None:
    """Nothing reads it, and a batch that is refused is a gap that no replay fills."""
    decoder = KvEventDecoder()
    if known:
        assert decoder.decode_payload(encode([1.5, [STORED]]))
    newer = {"type": "TierBlocksCleared\n", "medium": "GPU"}
    assert decoder.decode_payload(encode([ts, [STORED, newer, REMOVED]])) == OURS[:2]
    assert (decoder.left_out, decoder.torn) == (1, True), "it costs only itself, and says so"
    assert decoder.last_left_out == "its kind is not known: 'TierBlocksCleared\\n'"
    assert KvEventDecoder().decode_payload(encode({"ts": ts, "events": [STORED]})) == OURS[:1]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("cpu", 2), ("CPU", 2), ("Cpu", 2), ("CPU_PINNED", 2), ("cpu_pinned", 2), ("host", 2),
     ("host_pinned", 2), ("CPU_TIER1", 2), ("storage", 4), ("Disk", 4), ("CPU_TIER2", 4),
     ("NVMe", 4), ("FS", 4), ("EXTERNAL", 8), ("remote", 8), ("shared", 8), ("network", 8),
     ("OBJ", 8), ("SHARED_STORAGE", 8), ("OBJECT_STORE", 8)],
)  # fmt: skip
def test_media_are_read_in_any_case(medium: str, tier: int) -> None:
    events = decoded({**STORED, "medium": medium}, {**REMOVED, "medium": medium})
    assert events == [BlocksSpilled(KEYS, tier, 0), CopiesDropped(pack(3), tier)]
    for pool in ("gpu", "DEVICE"):
        assert decoded({**STORED, "medium": pool}) == OURS[:1]


def of_group(event: dict[str, Any], group: int | None, kind: str | None = None) -> dict[str, Any]:
    kinds = {} if kind is None else {"kv_cache_spec_kind": kind}
    return {**event, "group_idx": group, **kinds}


def held_after(*batches: list[dict[str, Any]]) -> set[int]:
    """What a pool holds by these batches."""
    decoder, held = KvEventDecoder(), set[int]()
    for batch in batches:
        for event in decoder.decode_payload(encode([1.5, batch])):
            keys = set(np.frombuffer(getattr(event, "hashes", b""), "<u8").tolist())
            if isinstance(event, BlocksStored):
                held |= keys
            elif isinstance(event, BlocksRemoved):
                held -= keys
            elif isinstance(event, BlocksCleared):
                held.clear()
    return held


def stored_blocks(*keys: int, parent: int | None = None) -> dict[str, Any]:
    return {**STORED, "block_hashes": list(keys), "parent_block_hash": parent}


def removed_blocks(*keys: int) -> dict[str, Any]:
    return {**REMOVED, "block_hashes": list(keys)}


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("full", ["full_attention", "mla_attention", "sink_full_attention"])
def test_the_first_group_with_full_attention_says_what_is_resident(full: str, window: int) -> None:
    """In whichever order the groups are told; our hooks observe the same one."""
    chain = stored_blocks(1, 2, 3, 4)
    told = [
        of_group(chain, 1, full),
        of_group(stored_blocks(3, 4), window, "sliding_window"),
        of_group({**stored_blocks(900), "block_size": 64}, 3, "mamba"),
        of_group(chain, 4, "full_attention"),
    ]
    gone = [
        of_group(removed_blocks(1, 2), window),
        of_group(removed_blocks(3), 4),
        of_group(removed_blocks(4), 1),
    ]
    for order in itertools.permutations(told):
        assert held_after(list(order), gone) == {1, 2, 3}


def test_groups_of_which_no_kind_is_told_count_as_one_by_their_first() -> None:
    told = [of_group(stored_blocks(1, 2), 0), of_group(stored_blocks(1, 2), 1)]
    assert held_after(told, [of_group(removed_blocks(1), 1)]) == {1, 2}
    assert held_after(told, [of_group(removed_blocks(1), 0)]) == {2}
    assert held_after([stored_blocks(1, 2)], [removed_blocks(1)]) == {2}
    assert held_after(told, [removed_blocks(1)]) == {2}, "what says no group counts"


def test_copies_of_groups_that_do_not_count_do_not_either() -> None:
    told = of_group(stored_blocks(1), 0, "full_attention")
    copies = [{**of_group(stored_blocks(1), group), "medium": "CPU"} for group in (0, 1)]
    lost = [{**of_group(removed_blocks(1), group), "medium": "CPU"} for group in (1, 0)]
    assert decoded(told, *copies, *lost)[1:] == [
        BlocksSpilled(pack(1), 2, 0),
        CopiesDropped(pack(1), 2),
    ]


def test_a_block_stays_until_its_last_copy_in_the_pool_is_gone() -> None:
    told = [stored_blocks(1, 2, 3), stored_blocks(3, parent=2)]
    assert held_after(told, [removed_blocks(3)]) == {1, 2, 3}
    assert held_after(told, [removed_blocks(3), removed_blocks(3)]) == {1, 2}
    assert held_after(told, [removed_blocks(3, 3, 1)]) == {2}
    assert held_after(told, [CLEARED, stored_blocks(3), removed_blocks(3)]) == set()


def test_what_a_request_found_is_not_one_more_copy() -> None:
    """It is told from the first block on, where a request wants it told."""
    told = [stored_blocks(1, 2, 3), stored_blocks(1, 2, 3), stored_blocks(1, 2)]
    assert held_after(told, [removed_blocks(3), removed_blocks(2)]) == {1}
