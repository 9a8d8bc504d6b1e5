"""Prefixes are computed before anybody asks: keys, what is stable, sweeps, and a server of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from http_answers import Asked, HttpAnswers
from kvgraph.advisor.cli import main
from kvgraph.advisor.precache.keeper import (
    Prefix,
    PrefixKeeper,
    ServerRefusalError,
    Warmer,
    WarmResult,
)
from kvgraph.advisor.precache.prefixes import (
    SYSTEM_PREFIX,
    ServerConfig,
    new_prefix,
    read_precache,
    stable_messages,
    warming_messages,
)
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.intents import Intent, IntentKind, Target, Verdict
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import BlocksStored, EngineHello, RequestFinished, RequestStarted
from small_world import pack

STABLE = [{"role": "system", "content": "Be kind."}]


def test_what_is_named_stands_before_what_is_stable_before_what_is_whole(tmp_path: Path) -> None:
    def key(*contents: object, **more: Any) -> str:
        said = tuple({"role": "user", "content": each} for each in contents)
        return new_prefix(messages=said, **more).key(tmp_path)

    tools = ({"type": "function"},)
    assert key("a", conversation="chat-7", tools=tools) == "conv:chat-7"
    assert key("a").startswith("seg:")
    assert key([{"type": "text", "text": "a"}]).startswith("pfx:")
    assert key("a", tools=tools) == key("a", tools=tools)
    assert key("a", tools=tools).startswith("v5:")
    assert key("a", tools=tools) != key("a", tools=({"type": "function", "name": "x"},))
    assert key("a", "b") != key("ab")


def render(variables: Any) -> list[dict[str, Any]]:
    """What an application sends at each turn."""
    asked = variables.get("asked", "")
    return [*STABLE, {"role": "user", "content": f"Today: sun.\n{variables['drop_from']}{asked}"}]


def test_a_stable_prefix_is_byte_for_byte_that_of_the_first_turn() -> None:
    stable = stable_messages(render, "<<turn>>", {})
    first = render({"drop_from": "", "asked": "What is this?"})
    whole, prefix = ("".join(m["role"] + m["content"] for m in each) for each in (first, stable))
    assert whole.startswith(prefix)
    assert stable[-1]["content"] == "Today: sun.\n"
    assert warming_messages(stable) == stable


def test_a_mark_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="no message holds it"):
        stable_messages(lambda _: STABLE, "<<turn>>", {})


class Answers:
    """A server's answers, one after the other; the last one stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[Any]()

    def __call__(self, path: str, body: Any) -> Any:
        self.asked.append(body)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def usage(tokens: int, cached: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}}


class Warming:
    """Sweeps at given times over one prefix that is wanted for 300 s."""

    def __init__(self, *answers: Any, **more: Any) -> None:
        self.now, self.ask = 0.0, Answers(*answers)
        self._prefix = Prefix("conv:a", STABLE, (), 300.0)
        self._warmer = Warmer(ServerConfig(model="m"), self.ask, clock=lambda: self.now, **more)

    def at(self, now: float) -> list[WarmResult]:
        self.now = now
        return self._warmer.sweep([self._prefix])

    def how(self, now: float) -> list[str]:
        return [each.how for each in self.at(now)]


def test_a_prefix_is_warmed_again_at_four_fifths_of_its_time() -> None:
    warming = Warming(usage(100, 0), usage(100, 96))
    assert [warming.how(now) for now in (0.0, 239.0, 240.0)] == [["cold"], [], ["warm"]]
    body = warming.ask.asked[0]
    assert (body["max_tokens"], body["temperature"]) == (1, 0)
    assert "kv_transfer_params" not in body, "not every server knows it"


def test_a_server_that_does_not_say_what_was_cached_is_not_called_cold() -> None:
    """As vLLM is, where nobody asks it to by an option."""
    warming = Warming({"usage": {"prompt_tokens": 100, "prompt_tokens_details": None}})
    (asked,) = warming.at(0.0)
    assert (asked.how, asked.tokens) == ("unknown", 100)
    assert warming.at(240.0) == [asked], "it is kept all the same"


def test_what_is_cold_again_is_told_why() -> None:
    warming = Warming(usage(30, 0))
    assert warming.at(0.0)[0].reason == ""
    assert "shorter than a block" in warming.at(240.0)[0].reason


def test_what_a_sidecar_leases_is_not_computed() -> None:
    leased = list[tuple[str, float]]()

    def lease(key: str, seconds: float) -> float:
        leased.append((key, seconds))
        return min(seconds, 200.0)

    warming = Warming(usage(100, 0), lease=lease)
    assert warming.how(0.0) == ["cold"]
    assert leased == [("conv:a", 300.0)], "other traffic may come before the next sweep"
    assert warming.at(159.0) == []
    assert warming.how(160.0) == ["leased"], "a lease ends first"
    assert (len(warming.ask.asked), len(leased)) == (1, 2)
    assert warming.ask.asked[0]["kv_transfer_params"]["kvgraph"] == {
        "session": "conv:a",
        "warming": True,
    }


def test_a_sidecar_that_has_not_heard_yet_is_asked_again() -> None:
    answers, slept = [0.0, 0.0, 300.0], list[float]()
    Warming(usage(100, 0), lease=lambda *_: answers.pop(0), sleep=slept.append).at(0.0)
    assert (answers, len(slept)) == ([], 2)


def test_what_no_sidecar_leases_is_computed_again() -> None:
    warming = Warming(usage(100, 0), lease=lambda *_: 0.0, sleep=lambda _: None)
    warming.at(0.0)
    assert warming.how(240.0) == ["cold"]
    assert len(warming.ask.asked) == 2


def test_what_a_server_refuses_is_tried_once() -> None:
    warming = Warming(ServerRefusalError("no", is_final=True))
    assert warming.how(0.0) == ["failed"]
    assert warming.at(1e6) == []
    assert len(warming.ask.asked) == 1


@pytest.mark.parametrize("answer", [ServerRefusalError("away"), [], {"usage": 3}, {"usage": {
    "prompt_tokens": "many"}}])  # fmt: skip
def test_what_a_server_could_not_say_is_asked_again(answer: Any) -> None:
    warming = Warming(answer)
    for now in (0.0, 240.0):
        (found,) = warming.at(now)
        assert found.how == "failed"
        assert found.reason
    assert len(warming.ask.asked) == 2


@pytest.mark.parametrize("warms", [True, False])
def test_a_warming_request_is_no_hit_and_no_miss_and_its_blocks_can_be_leased(warms: bool) -> None:
    graph, chain = KVCacheGraph(), pack(1, 2)
    ended = RequestFinished("r", chain, 33, 34, "length", "conv:a")
    graph.apply("e", [EngineHello("e", "m", 16, 40, "v"), BlocksStored(chain, None, 16)])
    for cached in (0, 32):
        began = RequestStarted("r", chain, 33, cached, 16, "conv:a", warms=warms)
        graph.apply("e", [began, ended])
    counted = [graph.counters[name] for name in ("requests", "prompt_tokens", "cached_tokens")]
    assert counted == ([0, 0, 0] if warms else [2, 66, 32])
    assert graph.explain(1)["hits"] == (0 if warms else 1)
    leased = graph.intents.apply(Intent(IntentKind.PIN, Target(session="conv:a"), 60.0))
    assert (leased.verdict, leased.blocks) == (Verdict.ACCEPTED, 2)


class Api(HttpAnswers):
    """Lists one model, and answers with what was sent so far, or with an error of that reason."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.url += "/v1"
        self.bodies: list[Any] = []
        self.refuses = False

    def _answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if self.refuses:
            return 400, {}, b"\nERROR all is lost: " + asked.body
        if not asked.body:
            return 200, {}, json.dumps({"data": [{"id": "demo"}]}).encode()
        self.bodies.append(json.loads(asked.body))
        cached = 0 if len(self.bodies) == 1 else 96
        return 200, {}, json.dumps(usage(100, cached)).encode()


@pytest.fixture
def api() -> Iterator[Api]:
    with closing(Api()) as api:
        yield api


def keeper_of(api: str, directory: Path, **options: Any) -> PrefixKeeper:
    text = f'pin = false\n[server]\nurl = "{api}"\n[[prefix]]\nsystem = "Be kind."'
    return PrefixKeeper(written(directory, text), **options)


def test_a_session_that_opens_is_warm_before_its_first_turn(api: Api, tmp_path: Path) -> None:
    said = SimpleQueue[WarmResult]()
    keeper = keeper_of(api.url, tmp_path, say=said.put).start()
    assert said.get(timeout=20).key == SYSTEM_PREFIX, "at the start"
    keeper.open("chat-7", [*STABLE, {"role": "user", "content": "Today: sun."}])
    assert said.get(timeout=20).key == "conv:chat-7", "and not with the next sweep"
    keeper.stop()
    assert api.bodies[1]["messages"][1]["content"] == "Today: sun."
    assert {(body["max_tokens"], body["temperature"]) for body in api.bodies} == {(1, 0)}


def test_one_sweep_that_fails_ends_no_keeper(
    api: Api, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = SimpleQueue[WarmResult]()

    def say(done: WarmResult) -> None:
        said.put(done)
        if done.key == SYSTEM_PREFIX:
            raise RuntimeError("the application's own")

    keeper = keeper_of(api.url, tmp_path, say=say).start()
    assert said.get(timeout=20).key == SYSTEM_PREFIX
    keeper.open("chat-7", STABLE)
    assert said.get(timeout=20).key == "conv:chat-7"
    keeper.stop()
    assert "not warmed: RuntimeError" in caplog.text


def test_a_session_is_kept_until_it_is_closed_or_forgotten(api: Api, tmp_path: Path) -> None:
    now = [0.0]
    keeper = keeper_of(api.url, tmp_path, clock=lambda: now[0])
    assert [each.key for each in keeper.sweep()] == [SYSTEM_PREFIX]
    for name in ("used", "closed", "left"):
        keeper.open(name, STABLE, ttl="5m")
    assert [each.key for each in keeper.sweep()] == ["conv:used", "conv:closed", "conv:left"]
    now[0] = 200.0
    keeper.used("used")
    keeper.used("nobody")
    keeper.close("closed")
    now[0] = 240.0
    assert [each.key for each in keeper.sweep()] == ["conv:left"], "untouched for 80 % of its time"
    now[0] = 440.0
    assert [each.key for each in keeper.sweep()] == ["conv:used"]
    now[0] = 3601.0
    assert [each.key for each in keeper.sweep()] == [SYSTEM_PREFIX, "conv:used"]
    now[0] = 3801.0
    assert keeper.sweep() == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"messages": []}, "neither"), ({"messages": STABLE, "ttl": "2h"}, "ttl")],
)
def test_a_session_that_cannot_be_kept_is_told_at_once(
    fields: Any, problem: str, api: Api, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        keeper_of(api.url, tmp_path).open("chat-7", **fields)


def test_what_no_server_takes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper_of("http://127.0.0.1:9/v1", tmp_path).sweep()
    assert "not warmed: http://127.0.0.1:9/v1 cannot be asked" in caplog.text


def test_what_a_server_says_of_a_prefix_is_in_no_log(
    api: Api, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers quote what they refuse, and the text may look like a line of the log."""
    api.refuses = True
    caplog.set_level("DEBUG")
    keeper_of(api.url, tmp_path).sweep()
    assert f"not warmed: {api.url} answered 400" in caplog.text
    assert not any(text in caplog.text for text in ("all is lost", "Be kind", '"messages"'))


def written(directory: Path, text: str) -> str:
    path = directory / "precache.toml"
    path.write_text(text)
    return str(path)


def precache(api: str, directory: Path, prefixes: str) -> None:
    """The command, once."""
    file = written(directory, f'pin = false\n[server]\nurl = "{api}"\n{prefixes}')
    with pytest.raises(SystemExit) as ended:
        main(["precache", file])
    assert ended.value.code == 0


def test_the_command_warms_what_a_file_names(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.md").write_text("Be kind.")
    chat = """
        [[prefix]]
        conversation = "chat-7"
        ttl = "24h"
        drop_from = "<<turn>>"
        messages = [{role = "user", content = "Today: sun.<<turn>>"}]
    """
    precache(api.url, tmp_path, '[[prefix]]\nsystem = "file:prompt.md"' + chat)
    assert capsys.readouterr().out.splitlines() == [
        f"{SYSTEM_PREFIX}: cold, 0 of 100 tokens were cached",
        "conv:chat-7: warm, 96 of 100 tokens were cached",
    ]
    assert api.bodies[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert api.bodies[1]["messages"] == [{"role": "user", "content": "Today: sun."}]
    assert {body["model"] for body in api.bodies} == {"demo"}


RENDER = """
def turn(variables):
    return [{"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Today: sun." + variables["drop_from"] + "Hello"}]
"""


def test_an_applications_own_renderer_says_what_is_stable(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.py").write_text(RENDER)
    precache(api.url, tmp_path, '[[prefix]]\nrender = "prompts.py:turn"\ndrop_from = "<<turn>>"')
    assert [each["content"] for each in api.bodies[0]["messages"]] == ["Be kind.", "Today: sun."]
    assert capsys.readouterr().out.startswith("seg:")


@pytest.mark.parametrize(
    ("prefixes", "problem"),
    [
        ("system = 'a'\n[[prefix]]\nsystem = 'b'", "give one of them a conversation"),
        ("render = 'none.py:turn'\ndrop_from = 'x'", "none.py"),
        ("render = 'prompts.py:no'\ndrop_from = 'x'", "no function 'no'"),
        ("render = 'turn'\ndrop_from = 'x'", "FILE.py:FUNCTION"),
        ("render = 'prompts.py:turn'", "wants drop_from"),
    ],
)
def test_what_cannot_be_precached_is_told_before_anything_is_asked(
    prefixes: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.py").write_text(RENDER)
    with pytest.raises(SystemExit) as ended:
        main(["precache", written(tmp_path, f"[[prefix]]\n{prefixes}")])
    assert ended.value.code == 2
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no such file"), ("[", "is not TOML"), ("[[prefix]]\nttl = '5m'", "neither"),
        ("[[prefix]]\nsystem = 'a'\nttl = '2h'", "ttl"),
        ("sweep_s = 5\n[[prefix]]\nsystem = 'a'", "sweep_s"), ("[server]\nurl = 'ftp://x'", "url"),
        ("[[prefix]]\nsystem = 'a'\nttll = '5m'", "ttll .*did you mean prefix.0.ttl"),
        ("sweep_s = 60", r"prefix \(.*: is missing"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_told(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_precache(Path(written(tmp_path, text)))
