"""What callers write into kv_transfer_params: read, clipped, or ignored with one warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvgraph.graph.events import Segment
from kvgraph.graph.types import LAYER_NAMES
from kvgraph.hooks.vllm.tagging import MAX_SEGMENTS, NO_MEANING, Meaning, TagReader


def read(tag: Any, prompt: int = 1000) -> Meaning:
    return TagReader().read({"kvgraph": tag}, prompt)


def test_a_full_tag() -> None:
    meaning = read(
        {
            "segments": [
                {"layer": "rules", "start": 0, "end": 96, "importance": 0.9},
                {"layer": "memories", "start": 96, "end": 128, "name": "n", "memory_id": "m-1"},
            ],
            "tenant": "acme",
            "session": "chat-7",
            "waiting_for_tool": True,
            "expected_return_s": 4,
            "session_ended": False,
        }
    )
    assert meaning == Meaning(
        (Segment(2, 0, 96, 0.9), Segment(5, 96, 128, None, "n", "m-1")),
        "acme", "chat-7", True, 4.0, False,
    )  # fmt: skip


def test_other_keys_of_the_users_connector_do_not_matter() -> None:
    params = {"do_remote_decode": True, "kvgraph": {"session": "a"}, "remote_host": "h"}
    assert TagReader().read(params, 10).session == "a"


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, "text", 7, [], {"kvgraph": None}])
def test_no_tag(params: object, caplog: pytest.LogCaptureFixture) -> None:
    assert TagReader().read(params, 10) is NO_MEANING
    assert not caplog.records


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ("text", "kvgraph"),
        ({"segments": "all"}, "segments"),
        ({"segments": [3]}, "segments"),
        ({"segments": [{"layer": "gold", "start": 0, "end": 5}]}, "segments.layer"),
        ({"segments": [{"layer": "rules", "start": -1, "end": 5}]}, "segments.start"),
        ({"segments": [{"layer": "rules", "start": 0, "end": 1 << 40}]}, "segments.end"),
        ({"segments": [{"layer": "rules", "start": 0, "end": True}]}, "segments.end"),
        (
            {"segments": [{"layer": "rules", "start": 0, "end": 5, "importance": 2}]},
            "segments.importance",
        ),
        ({"segments": [{"layer": "rules", "start": 0, "end": 5, "x": 1}]}, "segment key"),
        ({"tenant": 5}, "tenant"),
        ({"session": ["a"]}, "session"),
        ({"waiting_for_tool": "yes"}, "waiting_for_tool"),
        ({"expected_return_s": float("nan")}, "expected_return_s"),
        ({"expected_return_s": -1}, "expected_return_s"),
        ({"pin_forever": True}, "unknown key"),
    ],
)
def test_a_bad_field_is_named_once_and_left_out(
    tag: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = TagReader()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader.read({"kvgraph": tag}, 1000)
    assert len(caplog.records) == 1
    assert field in caplog.records[0].getMessage()


def test_the_good_part_of_a_bad_tag_counts() -> None:
    meaning = read(
        {
            "session": 9,
            "tenant": "acme",
            "segments": [
                {"layer": "nope", "start": 0, "end": 5},
                {"layer": "rules", "start": 0, "end": 64, "importance": "high"},
            ],
        }
    )
    assert meaning == Meaning((Segment(2, 0, 64),), tenant="acme")


def test_lengths_and_ranges_are_clipped() -> None:
    many = [{"layer": "rules", "start": 0, "end": 5}] * (MAX_SEGMENTS + 5)
    assert len(read({"segments": many}).segments) == MAX_SEGMENTS
    assert read({"session": "s" * 10_000_000}).session == "s" * 256
    beyond = {"segments": [{"layer": "rules", "start": 50, "end": 5000}]}
    assert read(beyond, prompt=100).segments == (Segment(2, 50, 100),)
    assert read(beyond, prompt=50).segments == ()


def test_a_value_never_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    secret = "\nERROR forged line \u202e"
    with caplog.at_level(logging.WARNING):
        read({secret: 1, "segments": [{"layer": secret, secret: 2}], "tenant": [secret]})
    assert caplog.records
    assert not any("forged" in record.getMessage() for record in caplog.records)


def test_lone_surrogates_can_be_sent() -> None:
    import msgspec

    session = read({"session": "a\ud800b"}).session
    msgspec.msgpack.encode(session)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_keys = st.sampled_from(
    ["segments", "tenant", "session", "waiting_for_tool", "expected_return_s", "session_ended"]
)
_segment = st.dictionaries(
    st.sampled_from(["layer", "start", "end", "importance", "name", "memory_id"]),
    _json | st.sampled_from(LAYER_NAMES),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_keys, _json | st.lists(_segment, max_size=4)), st.integers(0, 1 << 20))
def test_anything_is_read_without_an_exception(tag: Any, prompt: int) -> None:
    meaning = read(tag, prompt)
    assert all(0 <= s.start < s.end <= prompt for s in meaning.segments)
