"""What orchestrators and agent schedulers say in their own words counts as our hints do."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvgraph.graph.wire.events import Segment
from kvgraph.hooks.requests.hints import HintPolicy, HintTrust, Meaning, TagReader, other_words

CONTEXT = 4
PROMPT = 100


def asking(params: Any = None, hints: Any = None, **extra: Any) -> Any:
    sampling = SimpleNamespace(extra_args=extra or None)
    return SimpleNamespace(kv_transfer_params=params, kv_hints=hints, sampling_params=sampling)


def meant(request: Any, trust: HintTrust = HintTrust.ALL, tag: Any = None) -> Meaning:
    params = {"kvgraph": tag} if tag else request.kv_transfer_params
    return TagReader(HintPolicy(trust)).read(params, PROMPT, others=other_words(request))


def envelope(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    action = {
        "action_id": "a1", "action_type": kind, "action_version": version, "payload": payload,
    }  # fmt: skip
    return {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}


DIRECTIVES = [
    {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
    {"start": 32, "end": None, "priority": 20, "duration": 60.0},
    {"covers_output": True, "priority": 90},
]
RETAINED = (
    Segment(CONTEXT, 0, 32, 0.8, pinned_s=60.0),
    Segment(CONTEXT, 32, PROMPT, 0.2),
)


@pytest.mark.parametrize("place", ["kv_hint", "kv_hints", "the request", "json"])
def test_retained_ranges_are_segments(place: str, vllm_loaded: None) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    said: Any = envelope("kv.retain", scope="alice", directives=DIRECTIVES)
    if place == "the request":
        action = KvHintAction(**said["actions"][0])
        request = asking(hints=KvHintsEnvelope("0.1", "m1", [action]))
    elif place == "json":
        request = asking(retention_directives=json.dumps(DIRECTIVES), retention_scope="alice")
    else:
        request = asking({place: said})
    assert meant(request).segments == RETAINED


def test_a_session_that_is_retained_whole_has_a_lease() -> None:
    said = envelope(
        "kv.retain", priority=3, ttl_seconds=2.5, include_current_request=True,
        block_hashes=["11"], execute_at="request_completion",
    )  # fmt: skip
    (segment,) = meant(asking({"kv_hint": said})).segments
    assert (segment.start, segment.end, segment.importance, segment.pinned_s) == (
        0,
        PROMPT,
        None,
        2.5,
    )


def test_a_session_that_shall_go_has_ended() -> None:
    said = envelope("kv.evict", include_current_request=True, block_hashes=[])
    assert meant(asking({"kv_hint": said}), HintTrust.SESSION).session_ended
    said = envelope("kv.evict", block_hashes=["11"])
    assert not meant(asking({"kv_hint": said})).session_ended


@pytest.mark.parametrize(
    ("extra", "meaning"),
    [
        ({"is_last_step": False, "this_func_call": "bash"},
         Meaning(session="j", waiting_for_tool=True, tool="bash")),
        ({"this_func_call": "bash"}, Meaning(session="j", waiting_for_tool=True, tool="bash")),
        ({"is_last_step": "true", "this_func_call": "bash"},
         Meaning(session="j", session_ended=True)),
        ({"is_last_step": 1}, Meaning(session="j", session_ended=True)),
        ({}, Meaning(session="j")),
    ],
)  # fmt: skip
def test_a_job_is_a_session_and_its_steps_wait_for_tools(
    extra: dict[str, Any], meaning: Meaning
) -> None:
    assert meant(asking(job_id="j", **extra), HintTrust.SESSION) == meaning


def test_who_may_say_it_is_who_may_say_ours() -> None:
    said = envelope("kv.retain", directives=DIRECTIVES)
    assert not meant(asking({"kv_hint": said}, job_id="j"), HintTrust.SESSION).segments
    assert meant(asking({"kv_hint": said}, job_id="j"), HintTrust.OFF) == Meaning()


def test_our_words_stand_over_others() -> None:
    assert meant(asking(job_id="j"), tag={"session": "mine"}).session == "mine"


@pytest.mark.parametrize(
    "said",
    [
        envelope("kv.retain", "2.0", directives=DIRECTIVES),
        envelope("kv.fetch", block_hashes=[1], source_control_endpoint="tcp://x"),
        envelope("kv.retain", block_hashes=["1"], ttl_seconds=5),
        envelope("kv.future", directives=DIRECTIVES),
    ],
)
def test_what_is_not_about_the_prompt_is_left_out(said: Any) -> None:
    assert meant(asking({"kv_hint": said})) == Meaning()


@pytest.mark.parametrize("priority", [-(10**400), 10**400, float("nan"), -1, 101, True, "high"])
def test_a_priority_that_is_none_leaves_its_range_out_of_it(priority: Any) -> None:
    directive = {"start": 0, "end": 32, "priority": priority, "duration": 5}
    (segment,) = meant(asking(retention_directives=[directive])).segments
    assert (segment.importance, segment.pinned_s) == (None, None)


def test_lists_without_end_are_cut() -> None:
    said = envelope("kv.retain", directives=DIRECTIVES[:1] * 5000)
    said["actions"] *= 1000
    assert len(meant(asking({"kv_hint": said})).segments) == 1024


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -(10**400)])
    | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)  # fmt: skip
_NAMES = [
    "action_type", "action_version", "payload", "directives", "start", "end", "priority",
    "duration", "covers_output", "include_current_request", "ttl_seconds",
]  # fmt: skip
_said = st.recursive(
    _json | st.sampled_from(["kv.retain", "kv.evict", "1.0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=6)
    ),
    max_leaves=16,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_said, max_size=3) | _json, _said, _json, _json, _json)
def test_anything_is_read_without_an_exception(
    actions: Any, directives: Any, job: Any, last: Any, tool: Any
) -> None:
    extra = {"job_id": job, "is_last_step": last, "this_func_call": tool}
    said = {"actions": actions, "kv_hint": directives}
    meaning = meant(
        asking(
            {"kv_hint": said, "kv_hints": directives},
            said,
            retention_directives=directives,
            **extra,
        )
    )
    assert all(0 <= each.start < each.end <= PROMPT for each in meaning.segments)


def test_an_engine_hears_it(paper_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgraph_bench.paper.paper_engine import PaperEngine, Shape

    engine, ended = PaperEngine(paper_config, Shape(), random.Random(1)), []
    observer = engine.side.observer
    monkeypatch.setattr(observer, "_ended", lambda event, request: ended.append(event) or event)
    request = engine.ask(list(range(3, 40)), 2)
    request.sampling_params.extra_args = {"job_id": "j-1", "this_func_call": "bash"}
    while not request.is_finished():
        engine.step()
        engine.finish_copies()
    (event,) = ended
    assert (event.session, event.tool, event.waiting_for_tool) == ("j-1", "bash", True)
