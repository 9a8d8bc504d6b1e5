"""What the graph takes for the reason why an answer ended.

The way is the engine's: the marks are learned with vLLM's renderer, an answer is read when the end
of its request is sent, and the graph applies what is sent.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import NO_ROW, StopReason
from kvgraph.graph.wire.events import RequestFinished, RequestStarted
from kvgraph.hooks.link.outbox import LateEvents
from kvgraph.hooks.requests.ends import EndMarks
from kvgraph.hooks.vllm.api.learning import learn_marks
from kvgraph.hooks.vllm.reading import AnswerEnds, reader_of
from kvgraph_bench.meaning.families import (
    Call,
    Family,
    FamilyWriter,
    corpus,
    family_config,
    write_family,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STOPPED: Final = "FINISHED_STOPPED"
CUT: Final = "FINISHED_LENGTH_CAPPED"

_TOOLS: Final = (
    "bash", "read_file", "write_file", "edit", "grep", "web-search", "get_weather", "run.tests",
    "Task", "list_dir", "fetch", "python", "sql_query", "mcp__git__commit", "todo_write",
)  # fmt: skip
_KEYS: Final = ("path", "command", "query", "content", "url", "limit", "name", "description")
_LONG: Final = 12_000  # characters of a file that a call writes


@dataclass(frozen=True, slots=True)
class MadeAnswer:
    kind: str  # how it was made
    tokens: list[int]
    status: str  # vLLM's, of its request
    stop: StopReason  # why it ended
    tools: tuple[str, ...] = ()  # those that it calls; the reader may name any of them


class AnswerMaker:
    def __init__(self, family: Family, writer: FamilyWriter, seed: str) -> None:
        self._family = family
        self._writer = writer
        self._rng = random.Random(seed)
        self._texts = corpus()

    def answers(self, count: int) -> list[MadeAnswer]:
        kinds: list[Callable[[], MadeAnswer]] = [
            self._prose, self._bracketed, self._quoted, self._marked, self._half, self._call,
            self._long_call, self._forged, self._cut_prose, self._cut_call,
        ]  # fmt: skip
        if self._family.prose:
            kinds.append(self._said_call)
        if self._family.many:
            kinds.append(self._calls)
        return [kind() for _ in range(count) for kind in kinds]

    # Ends of turns ------------------------------------------------------------------------------

    def _prose(self) -> MadeAnswer:
        return self._turn("prose", self._text())

    def _bracketed(self) -> MadeAnswer:
        """Prose, or an object that is asked for, which ends as calls of some families do."""
        ends = (
            "See [1] and [2]", '{"name": "Bob", "age": 3, "tags": ["a", "b"]}', "print(f(x[0]))",
            '[{"name": "bash", "score": 0.5}]', "```json\n{}\n```", "[done]",
        )  # fmt: skip
        lead = self._text() + "\n" if self._rng.random() < 0.5 else ""
        return self._turn("bracketed", lead + self._rng.choice(ends))

    def _quoted(self) -> MadeAnswer:
        """A call that is quoted in an answer that goes on behind it."""
        call = self._written([self._made_call()])
        lead = self._text() + "\n" if self._rng.random() < 0.5 else ""
        end = self._rng.choice(("", " See [1].", " (as shown [above])"))
        special = self._rng.random() < 0.5
        return self._turn("quoted", f"{lead}{call}\n{self._text()}{end}", special)

    def _marked(self) -> MadeAnswer:
        """Prose that speaks of the family's own tokens."""
        ends = {self._family.turn_end, self._family.call_end, self._family.end}
        names = [name for name in self._family.special if name not in ends]
        words = self._text().split(" ")
        for _ in range(3):
            words.insert(self._rng.randrange(len(words)), self._rng.choice(names))
        return self._turn("marked", " ".join(words) + ".", special=self._rng.random() < 0.5)

    def _half(self) -> MadeAnswer:
        """A call that breaks off, and prose."""
        call = self._written([self._made_call()])
        return self._turn("half", call[: len(call) // 2] + "\n" + self._text())

    # Calls --------------------------------------------------------------------------------------

    def _call(self) -> MadeAnswer:
        return self._calling("call", [self._made_call()])

    def _said_call(self) -> MadeAnswer:
        return self._calling("said_call", [self._made_call()], self._text() + "\n")

    def _calls(self) -> MadeAnswer:
        return self._calling("calls", [self._made_call(), self._made_call()])

    def _long_call(self) -> MadeAnswer:
        """A call that writes a whole file."""
        content = "".join(self._rng.sample(self._texts, len(self._texts)))[:_LONG]
        name, arguments = self._made_call()
        return self._calling("long_call", [Call(name, {**arguments, "content": content})])

    def _forged(self) -> MadeAnswer:
        """A call whose arguments speak of another call."""
        inner = self._written([Call("forged", {"path": "x"})])
        name, arguments = self._made_call()
        call = Call(name, {**arguments, "content": f"{self._text()} {inner} {self._text()}"})
        return self._calling("forged", [call])

    # What was cut -------------------------------------------------------------------------------

    def _cut_prose(self) -> MadeAnswer:
        tokens = self._writer.tokens(self._family.opens_prose + self._text())
        return MadeAnswer("cut_prose", tokens, CUT, StopReason.TRUNCATED)

    def _cut_call(self) -> MadeAnswer:
        tokens = self._writer.tokens(self._written([self._made_call()]))
        cut = self._rng.randint(len(tokens) // 3, len(tokens))
        return MadeAnswer("cut_call", tokens[:cut], CUT, StopReason.TRUNCATED)

    # Parts --------------------------------------------------------------------------------------

    def _turn(self, kind: str, text: str, special: bool = True) -> MadeAnswer:
        tokens = self._writer.tokens(self._family.opens_prose)
        tokens += self._writer.tokens(text, special)
        tokens += self._writer.tokens(self._family.turn_end)
        return MadeAnswer(kind, tokens, STOPPED, StopReason.END_OF_TURN)

    def _calling(self, kind: str, calls: Sequence[Call], lead: str = "") -> MadeAnswer:
        tokens = self._writer.tokens(lead + self._written(calls) + self._family.call_end)
        tools = tuple(call.name for call in calls)
        return MadeAnswer(kind, tokens, STOPPED, StopReason.TOOL_CALL, tools)

    def _written(self, calls: Sequence[Call]) -> str:
        return self._family.write(calls, self._rng.random() < 0.5)

    def _made_call(self) -> Call:
        keys = self._rng.sample(_KEYS, self._rng.choice((0, 1, 1, 2, 3)))
        values: list[Any] = ["main.py", "ls -la | grep 'x'", 'say "hi" {now}', "it's [1]", "déjà"]
        return Call(self._rng.choice(_TOOLS), {key: self._rng.choice(values) for key in keys})

    def _text(self) -> str:
        text = self._rng.choice(self._texts)
        start = self._rng.randrange(max(1, len(text) - 400))
        return " ".join(text[start : start + self._rng.randint(40, 400)].split()) + "."


_ENGINE: Final = "bench"
_BLOCK: Final = 32
_PROMPT: Final = 8  # tokens of a prompt that nobody reads


@dataclass
class Judged:
    marks: EndMarks | None  # what its template taught; None: nothing
    answers: int = 0
    right: int = 0
    calls: int = 0
    named: int = 0
    # answers whose reason was mistaken, by kind
    wrong: Counter[str] = field(default_factory=Counter)
    misnamed: Counter[str] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        return self.right / self.answers

    @property
    def name_accuracy(self) -> float:
        """Share of tool calls of which a tool was named rightly."""
        return self.named / self.calls

    def add(self, answer: MadeAnswer, stop: StopReason, tool: str | None) -> None:
        self.answers += 1
        self.right += stop is answer.stop
        if stop is not answer.stop:
            self.wrong[f"{answer.kind}: {stop.name.lower()}"] += 1
        if answer.stop is StopReason.TOOL_CALL:
            self.calls += 1
            self.named += tool in answer.tools
            if tool not in answer.tools:
                self.misnamed[answer.kind] += 1


def judge(family: Family, directory: Path, count: int, seed: int) -> Judged:
    """Read ``count`` answers of every kind that a family's models give."""
    from vllm.tokenizers import cached_tokenizer_from_config

    config = family_config(family, write_family(family, directory))
    writer = FamilyWriter(family, cached_tokenizer_from_config(config.model_config))
    marks = learn_marks(config)
    judged = Judged(marks)
    understand = understanding(marks, config)
    for answer in AnswerMaker(family, writer, f"{seed}/{family.name}").answers(count):
        judged.add(answer, *understand(answer))
    return judged


def understanding(
    marks: EndMarks | None, config: VllmConfig
) -> Callable[[MadeAnswer], tuple[StopReason, str | None]]:
    """Why the graph thinks that an answer ended, and the tool that it waits for."""
    graph = KVCacheGraph()
    ends = None if marks is None else AnswerEnds(lambda: reader_of(marks, config))
    told = 0

    def understand(answer: MadeAnswer) -> tuple[StopReason, str | None]:
        nonlocal told
        told += 1
        name = f"answer {told}"
        started = RequestStarted(name, b"", _PROMPT, 0, _BLOCK, session=name)
        end = RequestFinished(
            name, b"", _PROMPT, _PROMPT + len(answer.tokens), answer.status.lower(), session=name
        )
        graph.apply(_ENGINE, [started, _sent(ends, end, answer.tokens)])
        return _believed(graph, name)

    return understand


def _sent(ends: AnswerEnds | None, end: RequestFinished, tokens: Sequence[int]) -> RequestFinished:
    if ends is None:
        return end
    request: Any = SimpleNamespace(output_token_ids=tokens, structured_output_request=None)
    queued = ends.of(end, request)
    return ends.read(end, tokens, None) if isinstance(queued, LateEvents) else queued


def _believed(graph: KVCacheGraph, session: str) -> tuple[StopReason, str | None]:
    sessions = graph.tables.sessions
    row = sessions.find(session, NO_ROW)
    return StopReason(int(sessions.stop[row])), sessions.tools.name(int(sessions.tool[row]))
