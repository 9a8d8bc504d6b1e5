"""Frames and the three shapes of vLLM's KV events: what is meant is read, the rest refused."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from kvgraph.graph.errors import VersionError, WireError
from kvgraph.graph.messages import wire
from kvgraph.graph.messages.advice import AdmissionMessage, RankingMessage, ResyncRequest
from kvgraph.graph.messages.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    EngineHello,
    RequestStarted,
    Segment,
)
from kvgraph.graph.messages.kv_events import KvEventDecoder

EVENTS = [
    EngineHello("host:1", "llama", 16, 100, "vllm 0.32.0", hashing="sha256 5be0cd19"),
    BlocksStored(b"\1" * 16, 2**64 - 1, 16, "s"),
    BlocksRemoved(b"\2" * 8),
    BlocksCleared(),
    RequestStarted("r", b"\3" * 8, 20, 16, 16, "s", "t", (Segment(2, 0, 16, 0.5, "policy", "m"),)),
]
encode = msgspec.msgpack.encode


def pack(*keys: int) -> bytes:
    return np.array(keys, dtype="<u8").tobytes()


def test_events_and_advice_survive_the_wire() -> None:
    assert wire.decode_events(wire.encode_events(7, EVENTS)) == wire.EventMessage(7, EVENTS)
    for advice in (
        RankingMessage(3, 0.1, pack(1, 2), b"", b""),
        ResyncRequest("gap"),
        AdmissionMessage(9, 0.25, 480, 38, 31),
        AdmissionMessage(9, 0.25, None, 3, 31),
    ):
        assert wire.decode_advice(wire.encode_advice(1, advice)) == (1, advice)


def test_a_hello_of_an_older_build_and_of_a_newer_one_are_understood() -> None:
    old, new = [1, "e", "m", 16, 100, "v"], [1, "e", "m", 16, 100, "v", [], "sha256 5be0", "more"]
    message = wire.decode_events([wire.HEADER, bytes(8), encode([[old, new]])])
    plain = EngineHello("e", "m", 16, 100, "v")
    assert message.events == [plain, EngineHello("e", "m", 16, 100, "v", (), "sha256 5be0")]
    assert plain.hashing == ""


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
        wire.decode_advice([wire.HEADER, b"\0" * 8, encode(room)])


@pytest.mark.parametrize("count", [0, 1, 2, 4, 100])
def test_a_wrong_number_of_frames_is_refused(count: int) -> None:
    with pytest.raises(WireError, match="3 frames"):
        wire.decode_events([b"x"] * count)


@pytest.mark.parametrize("seq", [b"", b"\0" * 7, b"\0" * 9, b"\0" * 64, b"\xff" * 8])
def test_a_wrong_sequence_number_is_refused(seq: bytes) -> None:
    header, _, payload = wire.encode_events(1, EVENTS)
    with pytest.raises(WireError, match="sequence number"):
        wire.decode_events([header, seq, payload])


def test_another_version_is_told_from_garbage() -> None:
    _, seq, payload = wire.encode_events(1, EVENTS)
    with pytest.raises(VersionError, match="version 9"):
        wire.decode_events([b"KVG\x09", seq, payload])
    with pytest.raises(WireError, match="not a kvgraph header"):
        wire.decode_events([b"HTTP", seq, payload])


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
        (
            [6, "r", pack(1), 16, 0, 16, None, None, [[2, 0, 16, float("nan")]]],
            "RequestStarted.segments[0].importance",
            False,
        ),
        (
            [7, "r", pack(1), 16, 16, "stop", None, None, True, float("inf")],
            "RequestFinished.expected_return_s",
            False,
        ),
        ([16, 0, 2**63, 0, 0, 0, 0], "AdviceApplied.moved", False),
        ([10, pack(1), float("nan")], "ConfidenceSampled.confidence", False),
        (["BlocksStored", pack(1)], "Unreadable", True),
        ([], "Unreadable", True),
    ],
)
def test_an_event_out_of_range_is_refused_by_name_and_alone(
    event: list[Any], field: str, torn: bool
) -> None:
    message = wire.decode_events([wire.HEADER, b"\0" * 8, encode([[event, [4]]])])
    assert message.events == [BlocksCleared()]
    assert message.refused.startswith(f"{field}: ")
    assert message.torn is torn
    assert message.unknown == 0


def test_an_event_of_a_newer_kind_is_left_out() -> None:
    payload = encode([[[99, pack(1)], [4], [2, pack(1), None, 16, "s", "a newer field"]]])
    message = wire.decode_events([wire.HEADER, b"\0" * 8, payload])
    assert message == (0, [BlocksCleared(), BlocksStored(pack(1), None, 16, "s")], 1, "", False)


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


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91\xdd\x00\x4c\x4b\x40" + b"\x80" * 5_000_000,
    ],
)
def test_lengths_that_lie_are_refused(claim: bytes) -> None:
    message = wire.decode_events([wire.HEADER, b"\0" * 8, claim])
    assert (message.events, message.torn) == ([], True)
    assert message.refused.startswith("no event batch: ")


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
    with pytest.raises(WireError):
        decoder.decode_payload(encode([1.5, ARRAYS]))


def test_hashes_in_bytes_are_their_low_64_bits() -> None:
    stored = {**STORED, "block_hashes": [b"\xaa" * 24 + (77).to_bytes(8, "big")]}
    events = KvEventDecoder().decode_payload(encode([1.5, [stored]]))
    assert events == [BlocksStored(pack(77), 9, 16, "s")]


def test_other_media_are_colder_tiers() -> None:
    batch = [1.5, [{**STORED, "medium": "CPU"}, {**REMOVED, "medium": "STORAGE"}]]
    spilled, dropped = KvEventDecoder().decode_payload(encode(batch))
    assert spilled == BlocksSpilled(pack(1, 2**64 - 1), 2, 0)
    assert dropped == CopiesDropped(pack(3), 4)


def test_events_of_a_newer_kind_cost_only_themselves() -> None:
    decoder = KvEventDecoder()
    batch = [1.5, [STORED, {"type": "BlockTeleported", "where": 3}, REMOVED]]
    assert decoder.decode_payload(encode(batch)) == OURS[:2]
    assert decoder.unknown_events == 1


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0}, {"block_size": -16}, {"block_size": 2**31}, {"block_hashes": [-1]},
        {"block_hashes": ["x"]}, {"parent_block_hash": -5}, {"block_hashes": None},
    ],
)  # fmt: skip
def test_impossible_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        KvEventDecoder().decode_payload(encode([1.5, [{**STORED, **change}]]))


def test_no_token_and_no_salt_gets_past_the_decoder() -> None:
    events = KvEventDecoder().decode_payload(encode([1.5, [STORED]]))
    assert "salt" not in repr(events)
