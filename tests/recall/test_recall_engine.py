"""Recall above vLLM's own scheduler: what comes back where, and that nobody else ever reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.recall.gate import DIRECTORY_VARIABLE, calibration_file, load
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from kvgraph_bench.recall.approximate import keep_calibration
from paper import words
from recall_usage import used

pytestmark = pytest.mark.usefixtures("vllm_loaded")
LIMITS = SpliceLimits(least_tokens=32, margin=4)
ASKS: dict[str, Any] = {"kv_transfer_params": {"kvgraph": {"recall": True}}}


def joined(*parts: Sequence[int]) -> list[int]:
    """Texts one after the other."""
    return [token for part in parts for token in part]


HEAD, DOCUMENT, ASK = words(40, 1), words(100, 2), words(20, 3)
OTHER_HEAD = words(55, 4)
SALTED = {**ASKS, "cache_salt": "theirs"}


@pytest.fixture
def engine(recalls: Callable[..., Any]) -> Any:
    return recalls(Shape(blocks=97), LIMITS)


def test_text_comes_back_at_another_position(engine: Any) -> None:
    first = used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    assert first == {"exact": 0, "own": 0, "spliced": 0, "computed": 160}
    # The document is behind 40 tokens of the prompt's own, which must be computed.
    assert used(engine, joined(OTHER_HEAD, DOCUMENT, ASK), **ASKS)["spliced"] == 0
    assert used(engine, joined(DOCUMENT, ASK), **ASKS)["spliced"] == 120 - 4 - 1
    engine.side.bridge.ledger.book.answer_all(())


def test_the_request_log_tells_what_was_spliced_apart(engine: Any) -> None:
    outbox, graph = engine.side.client.outbox, KVCacheGraph()
    outbox.open(1 << 16)
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    spliced = used(engine, joined(DOCUMENT, ASK), **ASKS)["spliced"]
    graph.apply("e", [engine.side.hello(), *outbox.take_all()])
    history = graph.tables.history
    blocks = request_view(history, history.requests.next - 1, float).blocks
    assert blocks.spliced == spliced // BLOCK_SIZE > 0
    assert (blocks.pool, blocks.loaded, blocks.asked) == (0, 0, 120 // BLOCK_SIZE)
    assert (graph.counters["requests_spliced"], graph.counters["tokens_spliced"]) == (1, spliced)
    assert blocks.computed == blocks.asked - blocks.spliced


def test_survivors_of_a_cut_move_forward_behind_the_exact_head(engine: Any) -> None:
    """A dropped part in the middle: what stays is exact before it and spliced behind it."""
    dropped = words(64, 9)
    used(engine, joined(HEAD, words(8, 8), dropped, DOCUMENT), **ASKS)
    told = used(engine, joined(HEAD, words(8, 8), DOCUMENT, ASK), **ASKS)
    assert told["exact"] == 48
    copied = (48 + 64 + 100 - 1) // BLOCK_SIZE * BLOCK_SIZE - 48 - 64  # whole blocks, of the first
    assert told["spliced"] == copied - 4
    assert told["computed"] == 168 - 48 - copied + 4


def test_who_did_not_ask_gets_and_gives_nothing(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    assert used(engine, joined(DOCUMENT, ASK)) == {}
    used(engine, joined(words(100, 11), ASK))
    assert used(engine, joined(words(100, 11)[7:], ASK), **ASKS)["spliced"] == 0


def test_another_tenants_text_is_never_spliced(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    assert used(engine, joined(DOCUMENT, ASK), **SALTED)["spliced"] == 0
    assert used(engine, joined(DOCUMENT[3:], ASK), **SALTED)["spliced"] > 0


def test_nothing_approximate_is_registered(engine: Any) -> None:
    """The model raises if anybody reads what was computed behind spliced tokens."""
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    prompt = joined(DOCUMENT, ASK, words(100, 5))
    request = engine.ask(prompt, 70, **ASKS)
    engine.settle()
    assert engine.model.exact == {request.request_id: 0}
    cached = engine.pool.cached_block_hash_to_block
    assert all(cached.get_one_block(each + bytes(4)) is None for each in request.block_hashes)
    engine.serve(prompt, 70)
    assert engine.model.spliced_read > 0


def test_it_stays_unregistered_when_the_rest_of_us_left(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    prompt = joined(DOCUMENT, ASK, words(100, 5))
    request = engine.ask(prompt, 70, **ASKS)
    engine.until(lambda: request.num_output_tokens > 3)
    engine.connector.disable("a test", RuntimeError())
    engine.settle()
    cached = engine.pool.cached_block_hash_to_block
    assert all(cached.get_one_block(each + bytes(4)) is None for each in request.block_hashes)


def test_what_opted_in_is_copied_as_soon_as_its_turn_ends(engine: Any) -> None:
    request = engine.ask(joined(HEAD, DOCUMENT, ASK), 1, **ASKS)
    engine.settle()
    assert all(each in engine.side.bridge.ledger.directory for each in request.block_hashes)


def test_a_failed_splice_is_computed(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    (worker,) = engine.workers
    worker.failing = lambda job: range(2) if getattr(job, "runs", ()) else ()
    engine.serve(joined(DOCUMENT, ASK), **ASKS)
    assert engine.side is not None
    engine.serve(joined(DOCUMENT, ASK))


def test_a_reset_forgets_all_text(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    assert engine.reset()
    assert used(engine, joined(DOCUMENT, ASK), **ASKS)["spliced"] == 0


def test_a_preempted_request_is_never_registered_beyond_what_is_exact(
    recalls: Callable[..., Any],
) -> None:
    engine = recalls(Shape(blocks=33), LIMITS)
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    for seed in range(4):
        engine.ask(joined(DOCUMENT, ASK, words(30, 20 + seed)), 90, **ASKS)
        engine.ask(joined(words(60, 30 + seed)), 90)
    engine.settle()
    engine.serve(joined(DOCUMENT, ASK, words(30, 20)), 90)
    assert engine.side is not None


@pytest.mark.parametrize("passed", [None, False])
def test_without_a_calibration_that_passed_it_is_refused_in_words(
    passed: bool | None, paper: Callable[..., Any], paper_config: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    if passed is not None:
        keep_calibration(paper_config.model_config, tmp_path, LIMITS, passed)
    caplog.set_level(logging.WARNING)
    engine = paper(Shape(blocks=97))
    used(engine, joined(HEAD, DOCUMENT, ASK))
    assert "no recall" not in caplog.text
    told = used(engine, joined(DOCUMENT, ASK), **ASKS)
    reason = "not calibrated" if passed is None else "did not pass its calibration"
    assert reason in told["refused"]
    assert caplog.text.count("kvgraph: no recall in this engine") == 1


def test_an_engine_without_tiers_says_so_if_it_is_told_to_recall(
    paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "1")
    caplog.set_level(logging.WARNING)
    paper(Shape(warm=None))
    assert "no recall in this engine: it has no tiers" in caplog.text


def test_the_endpoint_can_ask_for_all_and_switch_off_for_all(
    recalls: Callable[..., Any], paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "1")
    engine = recalls(Shape(blocks=97), LIMITS)
    used(engine, joined(HEAD, DOCUMENT, ASK))
    assert used(engine, joined(DOCUMENT, ASK))["spliced"] > 0
    refuses = {"kv_transfer_params": {"kvgraph": {"recall": False}}}
    assert used(engine, joined(DOCUMENT, ASK, [7]), **refuses) == {}
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "0")
    assert used(paper(Shape(blocks=97)), joined(DOCUMENT, ASK), **ASKS) == {}


@pytest.mark.usefixtures("engine")
def test_a_calibration_of_another_model_is_refused(paper_config: Any) -> None:
    from kvgraph.hooks.vllm.recall.support import model_identity

    model = paper_config.model_config
    path = calibration_file(model_identity(model, model.max_model_len))
    assert load(model_identity(model, model.max_model_len), path).passed
    with pytest.raises(ConfigError, match="not of this model"):
        load("another", path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(model_identity(model, model.max_model_len), path)


def session(name: str, **fields: Any) -> dict[str, Any]:
    tag = {"kvgraph": {"recall": True, "session": name}}
    return {"kv_transfer_params": tag, **fields}


def test_a_sessions_next_turn_finds_what_it_computed_behind_spliced_text(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    turn = joined(DOCUMENT, ASK, words(100, 5))
    assert used(engine, turn, output=30, **session("mine"))["spliced"] > 0
    said = engine.outputs[max(engine.outputs, key=lambda name: int(name[1:]))]
    again = joined(turn, said, words(40, 6))
    told = used(engine, again, output=5, **session("mine"))
    whole = (len(turn) + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (told["exact"], told["own"], told["spliced"]) == (0, whole, 0)
    third = used(engine, joined(again, words(20, 7)), **session("mine"))
    assert third["own"] > whole


@pytest.mark.parametrize(
    "fields",
    [session("other"), ASKS, {}, session("mine", cache_salt="theirs")],
    ids=["another session", "no session", "plain", "another tenant"],
)
def test_nobody_else_finds_it(engine: Any, fields: dict[str, Any]) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    turn = joined(DOCUMENT, ASK, words(100, 5))
    used(engine, turn, output=30, **session("mine"))
    assert used(engine, joined(turn, words(40, 6)), output=5, **fields).get("own", 0) == 0


def test_what_a_session_left_is_given_up_with_a_reset(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    turn = joined(DOCUMENT, ASK, words(100, 5))
    used(engine, turn, **session("mine"))
    assert engine.reset()
    told = used(engine, joined(turn, words(40, 6)), **session("mine"))
    assert (told["own"], told["spliced"]) == (0, 0)


def test_a_sessions_approximate_blocks_never_reach_the_disk(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    request = engine.ask(joined(DOCUMENT, ASK, words(100, 5)), 30, **session("mine"))
    engine.settle()
    directory, copies = engine.side.bridge.ledger.directory, list[Any]()
    for seed in range(40):
        engine.serve(words(100, 100 + seed))
        copies += [copy for copy in map(directory.warm, request.block_hashes) if copy is not None]
    assert copies
    assert not any(copy.may_demote for copy in copies)


@pytest.mark.parametrize("generations", [1, 4])
def test_nor_do_they_when_their_request_is_preempted(
    generations: int, recalls: Callable[..., Any]
) -> None:
    engine = recalls(Shape(blocks=33), replace(LIMITS, most_generations=generations))
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    for seed in range(2):
        engine.ask(words(60, 30 + seed), 150)
    engine.step()
    mine = engine.ask(joined(DOCUMENT, ASK, words(30, 20)), 90, **session("mine"))  # the last goes
    engine.until(lambda: mine.num_preemptions > 0)
    directory, copies = engine.side.bridge.ledger.directory, list[Any]()

    def looked() -> bool:
        copies.extend(filter(None, map(directory.warm, mine.block_hashes)))
        return mine.is_finished()

    engine.until(looked)
    assert copies
    assert not any(copy.may_demote for copy in copies)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nor_does_the_block_that_the_last_step_fills(
    asynchronous: bool, recalls: Callable[..., Any]
) -> None:
    shape = Shape(blocks=33, warm=40, cold=1024, asynchronous=asynchronous)
    for output in range(1, 33, 3):
        engine = recalls(shape, LIMITS)
        used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
        mine = engine.ask(joined(DOCUMENT, words(90, 4)), output, **session("mine"))
        engine.settle()
        for seed in range(4):
            engine.serve(words(20 * BLOCK_SIZE, 100 + seed), 2)
        assert engine.workers[0].disk
        assert not set(mine.block_hashes) & set(engine.workers[0].disk)


def test_what_is_spliced_has_other_names_than_what_was_computed(
    recalls: Callable[..., Any],
) -> None:
    """The same text again, whose computed blocks are gone from pool and memory meanwhile."""
    engine = recalls(Shape(blocks=65, warm=400), SpliceLimits(margin=0))
    document, later = words(96, 1), words(96, 2)
    used(engine, joined(words(24, 3), document, words(24, 4)), **ASKS)
    first = engine.ask(joined(document, later, words(20, 5)), 2, **session("mine"))
    engine.settle()
    used(engine, joined(words(40, 6), later, words(20, 7)), **ASKS)  # exact, elsewhere
    computed = first.block_hashes[len(document) // BLOCK_SIZE :]
    directory = engine.side.bridge.ledger.directory
    for seed in range(6):
        engine.serve(words(30 * BLOCK_SIZE, 500 + seed), 1)
    directory.drop_all(list(filter(None, map(directory.warm, computed))))
    again = engine.ask(joined(document, later, words(40, 8)), 2, **session("mine"))
    engine.until(lambda: again.num_output_tokens)
    assert engine.side.recall.exact[again.request_id] == 0
    assert not set(again.block_hashes) & set(computed)


@pytest.mark.parametrize(
    ("field", "value"),
    [("passed", "no"), ("least_tokens", "32"), ("margin", None), ("most_joints", 0),
     ("most_generations", 1.5), ("most_later", -1), ("openings", ...)],
)  # fmt: skip
def test_a_calibration_that_was_edited_is_refused(
    field: str, value: object, engine: Any, tmp_path: Path
) -> None:
    (path,) = tmp_path.glob("*.json")
    read = json.loads(path.read_text())
    inner = read if field == "passed" else read["limits"]
    if value is ...:
        del inner[field]
    else:
        inner[field] = value
    path.write_text(json.dumps(read))
    with pytest.raises(ConfigError, match=r"cannot be read .*calibrate again"):
        load(read["identity"], path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"cannot be read .*calibrate again"):
        load(read["identity"], path)


def saying(recall: bool | None = True, salt: str | None = None, **names: str) -> dict[str, Any]:
    """What a request says of itself."""
    tag: dict[str, Any] = {**({} if recall is None else {"recall": recall}), **names}
    return {"kv_transfer_params": {"kvgraph": tag}, **({"cache_salt": salt} if salt else {})}


@pytest.fixture
def is_found(recalls: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    def found(hints: str, shared: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
        monkeypatch.setenv("AITHER_KVCACHE_HINTS", hints)
        engine = recalls(Shape(blocks=97), LIMITS, shared)
        used(engine, joined(HEAD, DOCUMENT, ASK), **one)
        return bool(used(engine, joined(DOCUMENT, ASK), **other).get("spliced"))

    return found


@pytest.mark.parametrize("hints", ["session", "all"])
@pytest.mark.parametrize("shared", ["", "1"])
@pytest.mark.parametrize(
    ("one", "other", "finds"),
    [
        (saying(session="s"), saying(session="s"), {"", "1"}),
        (saying(session="s"), saying(session="t"), {"1"}),
        (saying(session="s"), saying(), {"1"}),
        (saying(), saying(), {"1"}),
        (saying(salt="x"), saying(salt="x"), {"", "1"}),
        (saying(salt="x", session="s"), saying(salt="x", session="t"), {"", "1"}),
        (saying(salt="x"), saying(salt="y"), set()),
        (saying(salt="x", session="s"), saying(session="s"), set()),
        (saying(salt="x", session="s"), saying(salt="y", session="s"), set()),
    ],
)
def test_whose_text_is_found(
    is_found: Callable[..., bool],
    hints: str, shared: str, one: dict[str, Any], other: dict[str, Any], finds: set[str],
) -> None:  # fmt: skip
    assert is_found(hints, shared, one, other) is (shared in finds)


@pytest.mark.parametrize("shared", ["", "1"])
@pytest.mark.parametrize(
    ("hints", "one", "other", "finds"),
    [
        ("all", saying(tenant="a"), saying(tenant="a"), True),
        ("all", saying(tenant="a", session="s"), saying(tenant="a", session="t"), True),
        ("all", saying(tenant="a", session="s"), saying(tenant="b", session="s"), False),
        ("all", saying(tenant="a", session="s"), saying(session="s"), False),
        ("all", saying(tenant="a", salt="x"), saying(tenant="b", salt="x"), False),
        ("session", saying(tenant="a", session="s"), saying(tenant="b", session="s"), True),
    ],
)
def test_named_tenants_are_apart_where_their_names_count(
    is_found: Callable[..., bool],
    shared: str, hints: str, one: dict[str, Any], other: dict[str, Any], finds: bool,
) -> None:  # fmt: skip
    assert is_found(hints, shared, one, other) is finds


def test_who_says_not_whose_text_it_is_is_told_why_nothing_comes_back(
    recalls: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "1")
    engine = recalls(Shape(blocks=97), LIMITS, "")
    for _ in range(2):
        assert "name its session" in used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)["refused"]
        assert used(engine, joined(DOCUMENT, ASK)) == {}, "who did not ask is not bothered"
    assert not engine.side.recall._opt_in._ownerless


def test_two_sessions_with_one_text_have_private_names_of_their_own(engine: Any) -> None:
    used(engine, joined(HEAD, DOCUMENT, ASK), **ASKS)
    asked = []
    for name in ("one", "two"):
        asked.append(engine.ask(joined(DOCUMENT, ASK, words(60, 8)), 40, **session(name)))
        engine.settle()
    exact = joined(DOCUMENT, ASK, words(60, 8))
    plain = engine.make("probe", exact, 1).block_hashes
    one, two = (each.block_hashes for each in asked)
    assert len(one) == len(two) > 8
    private = [each for each in one if each not in plain]
    assert len(private) > 4
    assert not set(private) & set(two)
