"""``stop_accuracy``: what the graph takes for the reason why an answer ended.

The way is the engine's: the marks are learned with vLLM's renderer, an answer is read when the end
of its request is sent, and the graph applies what is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import NO_ROW, StopReason
from kvgraph.graph.wire.events import RequestFinished, RequestStarted
from kvgraph.hooks.requests.ends import EndMarks
from kvgraph.hooks.vllm.api.learning import learn_marks
from kvgraph.hooks.vllm.reading import AnswerEnds, LateEnd, reader_of

from .families import Family
from .family_models import FamilyWriter, family_config, write_family
from .made_answers import AnswerMaker, MadeAnswer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ENGINE: Final = "bench"
_BLOCK: Final = 32
_PROMPT: Final = 8  # tokens of a prompt that nobody reads


@dataclass
class Judged:
    """What was understood of one family's answers.

    Attributes:
        marks: What its template taught; None: nothing.
        wrong: Answers whose reason was mistaken, by kind.
    """

    marks: EndMarks | None
    answers: int = 0
    right: int = 0
    calls: int = 0
    named: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    misnamed: Counter[str] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        """Share of answers whose end was understood."""
        return self.right / self.answers

    @property
    def name_accuracy(self) -> float:
        """Share of tool calls of which a tool was named rightly."""
        return self.named / self.calls

    def add(self, answer: MadeAnswer, stop: StopReason, tool: str | None) -> None:
        """Take what was understood of an answer."""
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
    """Read ``count`` answers of every kind that a family's models give.

    Args:
        directory: Where its model is written; must not exist.
    """
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
    """The end of a request, as it is sent to the sidecar."""
    if ends is None:
        return end
    request: Any = SimpleNamespace(output_token_ids=tokens, structured_output_request=None)
    queued = ends.of(end, request)
    return queued.event() if isinstance(queued, LateEnd) else queued


def _believed(graph: KVCacheGraph, session: str) -> tuple[StopReason, str | None]:
    sessions = graph.tables.sessions
    row = sessions.find(session, NO_ROW)
    return StopReason(int(sessions.stop[row])), sessions.tools.name(int(sessions.tool[row]))
