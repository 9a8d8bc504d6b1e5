"""What callers write into kv_transfer_params: read, clipped, or ignored with one warning."""

from __future__ import annotations

import json
import os
import random
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvgraph.graph.types import LAYER_NAMES, Authority
from kvgraph.graph.wire.events import MAX_NAME, Segment
from kvgraph.hooks.requests.hints import (
    MAX_SEGMENTS,
    NO_HINTS,
    CheckedHints,
    HintPolicy,
    HintReader,
    HintTrust,
    hint_policy,
    says_nothing,
    translate_hints,
)
from kvgraph.hooks.settings import EngineSettings

EVERYBODY = HintPolicy(HintTrust.ALL)
RULES = {"layer": "rules", "start": 0, "end": 5}


def read(tag: Any, prompt: int = 1000) -> CheckedHints:
    return HintReader(EVERYBODY).read({"kvgraph": tag}, prompt)


def test_a_full_tag() -> None:
    meaning = read({
        "segments": [
            {"layer": "rules", "start": 0, "end": 96, "importance": 0.9},
            {"layer": "memories", "start": 96, "end": 128, "name": "n", "memory_id": "m-1"},
        ],
        "tenant": "acme", "session": "chat-7", "waiting_for_tool": True, "expected_return_s": 4,
        "session_ended": False, "tool": "bash", "warming": True,
    })  # fmt: skip
    assert meaning == CheckedHints(
        (Segment(2, 0, 96, 0.9), Segment(5, 96, 128, None, "n", "m-1")),
        "acme", "chat-7", True, 4.0, False, "bash", None, True,
    )  # fmt: skip


def test_other_keys_of_the_users_connector_do_not_matter() -> None:
    params = {"do_remote_decode": True, "kvgraph": {"session": "a"}, "remote_host": "h"}
    assert HintReader(EVERYBODY).read(params, 10).session == "a"


@pytest.mark.parametrize("field", ["tenant", "session"])
@pytest.mark.parametrize(
    ("one", "other"), [("x" * 256 + "a", "x" * 256 + "b"), ("\ud800", "\ud801"), ("\ud800", "?")]
)
def test_names_that_no_event_can_hold_stay_several(field: str, one: str, other: str) -> None:
    """Else what one said could come back for the other."""
    found = [getattr(read({field: each}), field) for each in (one, other, one)]
    assert found[0] == found[2] != found[1]
    assert all(len(each) <= MAX_NAME and each.encode() for each in found)
    assert getattr(read({field: "x" * MAX_NAME}), field) == "x" * MAX_NAME


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, "text", 7, [], {"kvgraph": None}])
def test_no_tag(params: object, caplog: pytest.LogCaptureFixture) -> None:
    assert HintReader(EVERYBODY).read(params, 10) is NO_HINTS
    assert not caplog.records


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ("text", "kvgraph"),
        ({"segments": "all"}, "segments"),
        ({"segments": [3]}, "segments"),
        ({"segments": [RULES | {"layer": "gold"}]}, "segments.layer"),
        ({"segments": [RULES | {"start": -1}]}, "segments.start"),
        ({"segments": [RULES | {"end": 1 << 40}]}, "segments.end"),
        ({"segments": [RULES | {"end": True}]}, "segments.end"),
        ({"segments": [RULES | {"importance": 2}]}, "segments.importance"),
        ({"segments": [RULES | {"x": 1}]}, "segment key"),
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
    reader = HintReader(EVERYBODY)
    for _ in range(3):
        reader.read({"kvgraph": tag}, 1000)
    assert len(caplog.records) == 1
    assert field in caplog.records[0].getMessage()


def test_the_good_part_of_a_bad_tag_counts() -> None:
    segments = [RULES | {"layer": "nope"}, RULES | {"importance": "high"}]
    meaning = read({"session": 9, "tenant": "acme", "segments": segments})
    assert meaning == CheckedHints((Segment(2, 0, 5),), tenant="acme")


NAMES = st.sampled_from([None, "", "a", "\u4f60", "\ud800x", "q" * 300, 5])
SECONDS = st.sampled_from([None, True, False, 5, 5.5, -1, float("nan"), float("inf"), 10**30])
SAID = st.fixed_dictionaries(
    {"layer": st.sampled_from(["rules", "rules", "x", 5]),
     "start": st.sampled_from([0, 3, -1, True, 1.0, None, 1 << 100]),
     "end": st.sampled_from([0, 5, 2, 2000, (1 << 31) - 1, 1 << 31, None, False])},
    optional={"importance": st.sampled_from([None, 0, 1, 0.5, True, float("nan"), 2, "x"]),
              "name": NAMES, "memory_id": NAMES, "pinned": SECONDS, "x": st.none()},
)  # fmt: skip


@settings(max_examples=1000)
@given(SAID)
def test_a_segment_reads_alike_beside_one_that_is_none(item: Any) -> None:
    assert read({"segments": [item]}) == read({"segments": [item, 3]})


def test_lengths_and_ranges_are_clipped() -> None:
    many = [RULES] * (MAX_SEGMENTS + 5)
    assert len(read({"segments": many}).segments) == MAX_SEGMENTS
    session = read({"session": "s" * 10_000_000}).session
    assert session is not None
    assert (session[:200], len(session)) == ("s" * 200, MAX_NAME)
    beyond = {"segments": [{"layer": "rules", "start": 50, "end": 5000}]}
    assert read(beyond, prompt=100).segments == (Segment(2, 50, 100),)
    assert read(beyond, prompt=50).segments == ()


def test_a_value_never_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    secret = "\nERROR forged line \u202e"
    read({secret: 1, "segments": [{"layer": secret, secret: 2}], "tenant": [secret]})
    assert caplog.records
    assert not any("forged" in record.getMessage() for record in caplog.records)


FULL = {
    "segments": [{"layer": "axioms", "start": 0, "end": 96}], "tenant": "acme",
    "session": "chat-7", "waiting_for_tool": True, "expected_return_s": 0.0,
    "session_ended": True, "tool": "bash",
}  # fmt: skip
SECRET = "correct horse battery staple"


def stated(hints: str) -> EngineSettings:
    return EngineSettings.read({"AITHER_KVCACHE_HINTS": hints})


def policy_of(tmp_path: Path, value: str) -> HintPolicy:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "secret").chmod(0o600)
    return hint_policy(stated(value.replace("FILE", str(tmp_path / "secret"))))


@pytest.mark.parametrize(
    ("value", "presented", "sessions", "blocks"),
    [
        ("", None, True, False),
        ("session", None, True, False),
        ("all", None, True, True),
        ("ALL", None, True, True),
        ("off", None, False, False),
        ("secret:FILE", None, False, False),
        ("secret:FILE", "correct horse battery stapler", False, False),
        ("secret:FILE", "\ud800", False, False),
        ("secret:FILE", 7, False, False),
        ("secret:FILE", SECRET, True, True),
        ("off", SECRET, False, False),
        ("all", SECRET, True, True),
        ("secret:/nowhere", SECRET, False, False),
        ("everyone", None, False, False),
    ],
)
def test_who_may_say_what(
    tmp_path: Path, value: str, presented: object, sessions: bool, blocks: bool
) -> None:
    reader = HintReader(policy_of(tmp_path, value))
    tag = FULL if presented is None else {**FULL, "secret": presented}
    meaning = reader.read({"kvgraph": tag}, 1000, "from vLLM")
    authority = Authority.CALLER if value.lower() == "all" else Authority.OPERATOR
    said = Segment(0, 0, 96, authority=int(authority))
    assert meaning.segments == ((said,) if blocks else ())
    assert meaning.tenant == ("acme" if blocks else None)
    assert meaning.session == ("from vLLM" if sessions else None)
    assert (meaning.waiting_for_tool, meaning.session_ended) == (sessions or None, sessions)
    assert meaning.expected_return_s == (0.0 if sessions else None)
    assert meaning.tool == ("bash" if sessions else None)


def test_a_pipe_named_as_the_secret_holds_no_engine_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "secret.pipe"
    os.mkfifo(pipe)
    opened = partial(os.open, pipe, os.O_RDWR | os.O_NONBLOCK)
    late = threading.Timer(3.0, lambda: os.close(opened()))  # or a reader would wait for ever
    late.start()
    policy = hint_policy(stated(f"secret:{pipe}"))
    assert late.is_alive(), "nobody waited for it"
    late.cancel()
    assert "is no regular file" in caplog.text
    tag = {"kvgraph": {**FULL, "secret": ""}}
    assert HintReader(policy).read(tag, 1000).session is None


def test_what_is_not_allowed_is_said_once_without_the_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = HintReader(policy_of(tmp_path, "secret:FILE"))
    for _ in range(3):
        reader.read({"kvgraph": {**FULL, "secret": "wrong"}}, 1000)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(FULL)
    assert all("AITHER_KVCACHE_HINTS=secret:…" in line for line in said)
    assert not any("wrong" in line or SECRET in line for line in said)


@pytest.mark.parametrize("content", [None, "", "short", "\xff"])
def test_a_secret_that_is_none_trusts_nobody(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert hint_policy(stated(f"secret:{path}")) == HintPolicy(HintTrust.OFF)
    assert str(path) in caplog.text


@pytest.mark.parametrize("value", ["all", "session", "off"])
def test_a_salt_is_a_tenant_and_stays_secret(tmp_path: Path, value: str) -> None:
    reader = HintReader(policy_of(tmp_path, value))
    one, other = (reader.read(None, 10, None, salt).tenant for salt in ("salt-of-a", "b"))
    assert one is not None
    assert one != other
    assert one == reader.read(None, 10, "s", "salt-of-a").tenant
    assert "salt-of-a" not in one
    assert reader.read(None, 10).tenant is None


def test_a_stated_tenant_wins_over_the_salt_where_it_is_believed() -> None:
    believed, not_believed = (
        HintReader(HintPolicy(trust)).read({"kvgraph": {"tenant": "acme"}}, 10, None, "x").tenant
        for trust in (HintTrust.ALL, HintTrust.SESSION)
    )
    assert believed == "acme"
    assert not_believed not in ("acme", None)


@pytest.mark.parametrize(
    "name", ["a\0b", "x" * 10_000_000, "\u202egnirts", "🦆" * 300, "../../etc/passwd", "a\nb", '"}']
)
def test_any_name_can_be_sent_and_is_what_it_was(name: str) -> None:
    read_so = [getattr(read({field: name}), field) for field in ("session", "tenant")]
    for each in (*read_so, HintReader(EVERYBODY).read(None, 10, name).session):
        assert each[:200] == name[:200]
        assert len(each) == min(len(name), MAX_NAME)


_any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -(10**400)])
    | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)  # fmt: skip
_keys = st.sampled_from(
    ["segments", "tenant", "session", "waiting_for_tool", "expected_return_s", "tool",
     "session_ended"]
)  # fmt: skip
_segment = st.dictionaries(
    st.sampled_from(["layer", "start", "end", "importance", "name", "memory_id"]),
    _any_json | st.sampled_from(LAYER_NAMES),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_keys, _any_json | st.lists(_segment, max_size=4)), st.integers(0, 1 << 20))
def test_anything_is_read_without_an_exception(tag: Any, prompt: int) -> None:
    meaning = read(tag, prompt)
    assert all(0 <= s.start < s.end <= prompt for s in meaning.segments)


CONTEXT = 4
PROMPT = 100


def asking(params: Any = None, hints: Any = None, **extra: Any) -> Any:
    sampling = SimpleNamespace(extra_args=extra or None)
    return SimpleNamespace(kv_transfer_params=params, kv_hints=hints, sampling_params=sampling)


def meant(request: Any, trust: HintTrust = HintTrust.ALL, tag: Any = None) -> CheckedHints:
    params = {"kvgraph": tag} if tag else request.kv_transfer_params
    return HintReader(HintPolicy(trust)).read(params, PROMPT, others=translate_hints(request))


def envelope(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    action = {"action_id": "a1", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}


DIRECTIVES = [
    {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
    {"start": 32, "end": None, "priority": 20, "duration": 60.0},
    {"covers_output": True, "priority": 90},
]
RETAINED = (Segment(CONTEXT, 0, 32, 0.8, pinned_s=60.0), Segment(CONTEXT, 32, PROMPT, 0.2))


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
    where = segment.start, segment.end
    assert (*where, segment.importance, segment.pinned_s) == (0, PROMPT, None, 2.5)


def test_a_session_that_shall_go_has_ended() -> None:
    said = envelope("kv.evict", include_current_request=True, block_hashes=[])
    assert meant(asking({"kv_hint": said}), HintTrust.SESSION).session_ended
    said = envelope("kv.evict", block_hashes=["11"])
    assert not meant(asking({"kv_hint": said})).session_ended


@pytest.mark.parametrize(
    ("extra", "meaning"),
    [
        ({"is_last_step": False, "this_func_call": "bash"},
         CheckedHints(session="j", waiting_for_tool=True, tool="bash")),
        ({"this_func_call": "bash"}, CheckedHints(session="j", waiting_for_tool=True, tool="bash")),
        ({"is_last_step": "true", "this_func_call": "bash"},
         CheckedHints(session="j", session_ended=True)),
        ({"is_last_step": 1}, CheckedHints(session="j", session_ended=True)),
        ({}, CheckedHints(session="j")),
    ],
)  # fmt: skip
def test_a_job_is_a_session_and_its_steps_wait_for_tools(
    extra: dict[str, Any], meaning: CheckedHints
) -> None:
    assert meant(asking(job_id="j", **extra), HintTrust.SESSION) == meaning


def test_who_may_say_it_is_who_may_say_ours() -> None:
    said = envelope("kv.retain", directives=DIRECTIVES)
    assert not meant(asking({"kv_hint": said}, job_id="j"), HintTrust.SESSION).segments
    assert meant(asking({"kv_hint": said}, job_id="j"), HintTrust.OFF) == CheckedHints()


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
    assert meant(asking({"kv_hint": said})) == CheckedHints()


@pytest.mark.parametrize("priority", [-(10**400), 10**400, float("nan"), -1, 101, True, "high"])
def test_a_priority_that_is_none_leaves_its_range_out_of_it(priority: Any) -> None:
    directive = {"start": 0, "end": 32, "priority": priority, "duration": 5}
    (segment,) = meant(asking(retention_directives=[directive])).segments
    assert (segment.importance, segment.pinned_s) == (None, None)


def test_lists_without_end_are_cut() -> None:
    said = envelope("kv.retain", directives=DIRECTIVES[:1] * 5000)
    said["actions"] *= 1000
    assert len(meant(asking({"kv_hint": said})).segments) == 1024


_NAMES = [
    "action_type", "action_version", "payload", "directives", "start", "end", "priority",
    "duration", "covers_output", "include_current_request", "ttl_seconds",
]  # fmt: skip
_said = st.recursive(
    _any_json | st.sampled_from(["kv.retain", "kv.evict", "1.0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=6)
    ),
    max_leaves=16,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_said, max_size=3) | _any_json, _said, _any_json, _any_json, _any_json)
def test_anything_of_others_is_read_without_an_exception(
    actions: Any, directives: Any, job: Any, last: Any, tool: Any
) -> None:
    extra = {"job_id": job, "is_last_step": last, "this_func_call": tool}
    said = {"actions": actions, "kv_hint": directives}
    params = {"kv_hint": said, "kv_hints": directives}
    meaning = meant(asking(params, said, retention_directives=directives, **extra))
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


SAID = (
    {"session_id": "a"},
    {"cache_salt": "s"},
    {"kv_transfer_params": {"kvgraph": {"session": "a"}}},
    {"kv_transfer_params": {"kv_hint": {"actions": []}}},
    {"sampling_params": SimpleNamespace(extra_args={"job_id": "a"})},
    {"kv_hints": {"actions": []}},
)


@pytest.mark.parametrize("said", SAID)
def test_a_request_says_nothing_only_where_nothing_is_read(said: dict[str, Any]) -> None:
    silent = {
        "kv_transfer_params": None, "session_id": None, "cache_salt": None,
        "sampling_params": SimpleNamespace(extra_args=None), "kv_hints": None,
    }  # fmt: skip
    assert says_nothing(SimpleNamespace(**silent))
    assert not says_nothing(SimpleNamespace(**silent | said))
