"""Wishes outside of requests, over HTTP; and a real LangGraph graph that says what it waits for."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import waiting
from kvgraph.advisor.intents.client import IntentClient
from kvgraph.advisor.intents.langgraph import LangGraphCallbacks, SessionSignals
from kvgraph.advisor.page.intents import MOST_WISHES
from kvgraph.advisor.tools.remote import RemoteError
from kvgraph.dashboards.access import EDIT_HEADER, edit_token, page_token
from kvgraph.dashboards.server import HttpServer
from kvgraph.dashboards.source import StatusSource
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import EngineHello
from kvgraph.hooks.fake import FakeEngine
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt
from page_app import create_app
from page_sidecar import BLOCK, TOKEN, PageSidecar
from small_world import page_over
from turns import turn_events

PATIENCE_S = 20.0


def calls(*tools: str) -> AIMessage:
    asked = [
        ToolCall(name=name, args={"what": "x"}, id=f"{name}-{n}") for n, name in enumerate(tools)
    ]
    return AIMessage(content="", tool_calls=asked)


class Agent:
    """An agent whose model says what a test wants, and is served by an engine that a sidecar knows.

    Attributes:
        slow: What the tool ``search`` waits for.
    """

    def __init__(self, signals: LangGraphCallbacks, engine: FakeEngine, *says: AIMessage) -> None:
        self.slow, self.started = threading.Event(), threading.Event()
        self._engine, self._model = engine, GenericFakeChatModel(messages=iter(says))
        self.saver = signals.watch(InMemorySaver())
        self._config: RunnableConfig = {"callbacks": [signals]}
        tools = [
            StructuredTool.from_function(each, description="For a test.")
            for each in (self.search, self.approve, self.broken)
        ]
        graph = StateGraph(MessagesState)
        graph.add_node("model", self._turn)
        graph.add_node("tools", ToolNode(tools, handle_tool_errors=False))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        self.graph = graph.compile(checkpointer=self.saver)

    def config(self, thread: str) -> RunnableConfig:
        return {**self._config, "configurable": {"thread_id": thread}}

    def run(self, thread: str, words: Any = "Hello") -> dict[str, Any]:
        said = words if isinstance(words, Command) else {"messages": [HumanMessage(words)]}
        found: dict[str, Any] = self.graph.invoke(said, self.config(thread))
        return found

    def search(self, what: str) -> str:
        self.started.set()
        assert self.slow.wait(PATIENCE_S)
        return f"found {what}"

    def approve(self, what: str) -> str:
        return str(interrupt(what))

    def broken(self, what: str) -> str:
        raise ValueError(what)

    def _turn(self, state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        thread = config["configurable"]["thread_id"]
        self._engine.run(list(range(BLOCK * (1 + len(state["messages"])))), thread)
        return {"messages": [self._model.invoke(state["messages"])]}


@pytest.fixture(scope="module")
def page_sidecar() -> Iterator[PageSidecar]:
    """One for all tests, each of which has threads of its own."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as directory:
        sidecar = PageSidecar(Path(directory))
        sidecar.start()
        yield sidecar
        sidecar.stop()


@pytest.fixture(scope="module")
def engine(page_sidecar: PageSidecar) -> Iterator[FakeEngine]:
    with FakeEngine(page_sidecar.endpoint, 64, BLOCK) as engine:
        yield engine


@pytest.fixture
def signals(page_sidecar: PageSidecar) -> Iterator[LangGraphCallbacks]:
    signals = LangGraphCallbacks(page_sidecar.url, TOKEN)
    yield signals
    signals.close()


def known(sidecar: PageSidecar, session: str) -> dict[str, Any]:
    """What the sidecar says of a session; nothing before it has heard of it."""
    try:
        return cast(dict[str, Any], sidecar.get(f"/sessions/{session}/explain"))
    except urllib.error.HTTPError:
        return {}


def until(sidecar: PageSidecar, session: str, **is_so: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := known(sidecar, session)).items() >= is_so.items():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_while_a_tool_runs_the_session_waits_for_it(
    page_sidecar: PageSidecar, engine: FakeEngine, signals: LangGraphCallbacks
) -> None:
    agent = Agent(signals, engine, calls("search"), AIMessage("Done."))
    run = threading.Thread(target=agent.run, args=("tool",))
    run.start()
    try:
        until(page_sidecar, "tool", state="waiting_for_tool", waits_for="search")
    finally:
        agent.slow.set()
        run.join(PATIENCE_S)
    until(page_sidecar, "tool", state="idle", last_stop="end_of_turn", turns=2)


def test_a_tool_that_asks_a_person_is_waited_for_as_a_person_is(
    page_sidecar: PageSidecar, engine: FakeEngine, signals: LangGraphCallbacks
) -> None:
    agent = Agent(signals, engine, calls("approve"), AIMessage("Done."), calls("approve"))
    assert agent.run("person")["__interrupt__"]
    until(page_sidecar, "person", state="idle", last_stop="end_of_turn", waits_for=None, turns=1)
    agent.run("person", Command(resume="yes"))
    until(page_sidecar, "person", last_stop="end_of_turn", turns=2)
    asyncio.run(agent.graph.ainvoke({"messages": [HumanMessage("Hi")]}, agent.config("later")))
    until(page_sidecar, "later", state="idle", last_stop="end_of_turn")


def test_a_thread_that_is_deleted_is_a_session_that_is_over(
    page_sidecar: PageSidecar, engine: FakeEngine, signals: LangGraphCallbacks
) -> None:
    agent = Agent(signals, engine, AIMessage("One."), AIMessage("Two."))
    for thread in ("gone", "gone-too"):
        agent.run(thread)
        until(page_sidecar, thread, last_stop="end_of_turn")
    agent.saver.delete_thread("gone")
    asyncio.run(agent.saver.adelete_thread("gone-too"))
    for thread in ("gone", "gone-too"):
        until(page_sidecar, thread, state="ended")
        assert agent.saver.get(agent.config(thread)) is None


def test_a_run_that_fails_has_ended_its_turn(
    page_sidecar: PageSidecar, engine: FakeEngine, signals: LangGraphCallbacks
) -> None:
    agent = Agent(signals, engine, calls("broken"))
    with pytest.raises(ValueError, match="x"):
        agent.run("fails")
    until(page_sidecar, "fails", state="idle", last_stop="end_of_turn")


def test_a_silent_sidecar_costs_an_agent_nothing_but_one_line(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    signals = LangGraphCallbacks("http://127.0.0.1:9", "no token")
    agent = Agent(signals, engine, *[calls("search", "search"), AIMessage("Done.")] * 3)
    agent.slow.set()
    for thread in ("a", "b", "c"):
        assert agent.run(thread)["messages"][-1].content == "Done."
    signals.close(PATIENCE_S)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("kvgraph")]
    assert len(lines) == 1
    assert "signals are dropped: no sidecar answers" in lines[0]


class Heard:
    """A client that notes what it is told, unless it hangs."""

    def __init__(self, answer: str = "accepted", *, hangs: bool = False) -> None:
        self.words: list[tuple[str, ...]] = []
        self.leave = threading.Event()
        if not hangs:
            self.leave.set()
        self.answer = answer

    def __getattr__(self, kind: str) -> Callable[..., dict[str, str]]:
        def told(session: str, *rest: Any, **named: Any) -> dict[str, str]:
            assert self.leave.wait(PATIENCE_S)
            self.words.append((kind, session, *filter(None, rest)))
            return {"answer": self.answer}

        return told


def new_words(heard: Heard, settle_s: float = 0.0) -> SessionSignals:
    return SessionSignals(lambda: cast(IntentClient, heard), settle_s=settle_s)


def test_only_the_latest_word_on_a_session_is_told() -> None:
    heard = Heard()
    words = new_words(heard, settle_s=PATIENCE_S)
    words.waits("a", "bash")
    words.turn_ended("a")
    words.waits("b", "bash")
    words.goes_on("b")
    words.turn_ended("c")
    words.goes_on("c")
    words.close(PATIENCE_S)
    assert heard.words == [("turn_ended", "a"), ("turn_ended", "c")]


def test_nobody_waits_for_a_sidecar_that_hangs_and_the_words_are_bounded() -> None:
    heard = Heard(hangs=True)
    words = new_words(heard)
    for number in range(5000):
        words.waits(f"chat-{number}", "bash")
    heard.leave.set()
    words.close(PATIENCE_S)
    assert 1024 <= len(heard.words) < 1100
    assert heard.words[-1] == ("waiting", "chat-4999", "bash")


def test_a_session_that_no_sidecar_knows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard("missing")
    words = new_words(heard, settle_s=PATIENCE_S)
    for name in "abc":
        words.turn_ended(name)
    words.close(PATIENCE_S)
    assert len(heard.words) == 3
    assert len(caplog.records) == 1
    assert "kvgraph.hints(session=" in caplog.text


def test_a_session_that_a_sidecar_has_not_heard_of_yet_is_told_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Heard("missing")
    words = new_words(heard)
    words.turn_ended("a")
    waiting.until(lambda: caplog.records)
    words.close(PATIENCE_S)
    assert heard.words == [("turn_ended", "a")] * 2
    assert len(caplog.records) == 1


def test_after_a_silence_a_sidecar_is_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    heard, asked = Heard(), list[float]()

    def connect() -> IntentClient:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise RemoteError("none is running")
        return cast(IntentClient, heard)

    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    words = SessionSignals(connect, settle_s=0.0)
    for at, name in ((1000.0, "a"), (1005.0, "b"), (1011.0, "c")):
        now[0] = at
        words.turn_ended(name)
        words.close(PATIENCE_S)
    assert len(asked) == 2
    assert heard.words == [("turn_ended", "c")]
    assert len(caplog.records) == 1


def test_runs_without_a_thread_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(SessionSignals, "turn_ended", lambda _, session: said.append(session))
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [AIMessage("Hi.")]})
    graph.add_edge(START, "model")
    compiled = graph.compile()
    compiled.invoke({"messages": []}, {"callbacks": [LangGraphCallbacks("http://127.0.0.1:9")]})
    assert said == []


def test_without_langchain_the_package_imports_and_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "langchain_core.py").write_text(
        "raise ImportError('No module named langchain_core')"
    )
    code = "import kvgraph; kvgraph.IntentClient; kvgraph.LangGraphCallbacks"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "pip install 'kvgraph[langgraph]'" in done.stderr


SECRET = "a secret that nobody guesses"


class Source:
    """A sidecar's page over a graph of two sessions, of two blocks each."""

    def __init__(self) -> None:
        self.graph = KVCacheGraph()
        self.page = page_over(self.graph)
        self.graph.apply("e", [EngineHello("e", "", 16, 40, "v")])
        for session, keys in (("a", (1, 2)), ("b", (3, 4))):
            self.graph.apply("e", turn_events(session, *keys))


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def url(source: Source) -> Iterator[str]:
    app = create_app(cast(StatusSource, source), {"127.0.0.1"}, SECRET)
    server = HttpServer(app, "127.0.0.1", 0)
    server.start()
    yield server.url
    server.stop()


def post(url: str, body: Any, secret: str = SECRET, edit: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {secret}"}
    headers[EDIT_HEADER] = edit_token(SECRET) if edit is None else edit
    return httpx.post(f"{url}/v1/intents", json=body, headers=headers, trust_env=False, timeout=30)


def test_the_client_is_answered_for_every_kind(source: Source, url: str) -> None:
    client = IntentClient(url, SECRET)
    assert client.pin(session="a", seconds=60)["answer"] == "accepted"
    assert source.graph.rank("e", 10).order.tolist() == [4, 3, 2, 1]
    assert client.demote(block=2)["answer"] == "accepted"
    assert source.graph.rank("e", 10).order.tolist()[:2] == [2, 1]
    assert client.retain(0.5, session="b")["blocks"] == 2
    assert client.share(session="b")["answer"] == "accepted"
    assert client.prefetch(session="b")["reason"] == "all of them are in a pool already"
    assert client.pin(session="b", tenant="acme")["answer"] == "missing"
    assert client.pin()["answer"] == "rejected"


@pytest.mark.parametrize(
    ("importance", "session", "named"),
    [(7, "a", "importance"), (float("nan"), "a", "importance"), (1, "a" * 300, "session"),
     (1, "a" * 10_000_000, "bytes")],
)  # fmt: skip
def test_a_wish_that_is_malformed_is_answered_too(
    importance: float, session: str, named: str, source: Source, url: str
) -> None:
    answer = IntentClient(url, SECRET).retain(importance, session=session)
    assert answer["answer"] == "rejected"
    assert named in answer["reason"]


def test_signals_say_what_a_session_does(source: Source, url: str) -> None:
    client = IntentClient(url, SECRET)
    assert client.waiting("a", tool="bash", expected_return_s=5)["answer"] == "accepted"
    assert source.graph.explain_session("a")["waits_for"] == "bash"
    assert client.turn_ended("b")["answer"] == "accepted"
    assert source.graph.explain_session("b")["last_stop"] == "end_of_turn"
    assert client.ended("b")["answer"] == "accepted"
    assert source.graph.explain_session("b")["state"] == "ended"
    assert client.ended("nobody")["answer"] == "missing"


def test_whoever_may_only_read_changes_nothing(source: Source, url: str) -> None:
    body = {"intents": [{"kind": "pin", "session": "a"}]}
    before = source.graph.changes.total
    assert post(url, body, secret="x").status_code == 401
    assert post(url, body, secret=page_token(SECRET), edit="").status_code == 403
    assert post(url, body, edit=page_token(SECRET)).status_code == 403
    assert source.graph.changes.total == before
    with pytest.raises(RemoteError, match="answered 401"):
        IntentClient(url, "wrong").pin(session="a")


@pytest.mark.parametrize(
    "wish",
    [
        {}, {"kind": "burn", "session": "a"}, {"kind": "pin", "session": "a" * 300},
        {"kind": "pin", "block": "-5"}, {"kind": "pin", "block": "1e3"},
        {"kind": "pin", "block": "99999999999999999999"},
        {"kind": "retain", "session": "a", "importance": 2},
        *({"kind": "pin", "session": "a", **more} for more in (
            {"seconds": -1}, {"unknown": 1}, {"seconds": True}, {"seconds": "60"},
            {"waiting_for_tool": True},
        )),
        {"kind": "signal", "session": "a", "session_ended": True, "seconds": 4},
        {"kind": "signal", "session": "a", "waiting_for_tool": 1},
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_whole(wish: dict[str, Any], source: Source, url: str) -> None:
    before = source.graph.changes.total
    good = {"kind": "pin", "session": "a"}
    assert post(url, {"intents": [good, wish]}).status_code == 422
    assert post(url, {"intents": [good] * (MOST_WISHES + 1)}).status_code == 422
    assert source.graph.changes.total == before


@pytest.mark.parametrize("block", ["0xffffffffffffffff", "18446744073709551615", "7"])
def test_a_block_that_nobody_knows_is_missing(block: str, url: str) -> None:
    answer = post(url, {"intents": [{"kind": "pin", "block": block}]}).json()
    assert answer["answers"][0]["answer"] == "missing"
