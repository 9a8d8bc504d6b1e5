"""Why answers end: marks learned from templates, answers read by them, ends told with them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from answer_stops import judge
from kvgraph.graph.wire.events import BlocksCleared, RequestFinished
from kvgraph.hooks.link.outbox import Outbox
from kvgraph.hooks.requests.ends import (
    END_OF_TURN,
    UNKNOWN,
    AnswerReader,
    Ending,
    EndMarks,
    configured_marks,
    read_marks,
)
from kvgraph.hooks.settings import ENDS_KEY, ENDS_VARIABLE
from kvgraph.hooks.vllm import plugin
from kvgraph.hooks.vllm.api.learning import engine_marks
from kvgraph.hooks.vllm.patches import given_template, remember_templates
from kvgraph.hooks.vllm.reading import AnswerEnds, is_bound
from kvgraph_bench.meaning.families import FAMILIES, TOOLLESS, Family, family_config, write_family
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.tool_parsers.structural_tag_registry import (
    SUPPORTED_STRUCTURAL_TAG_MODELS,
    get_model_structural_tag,
)

pytestmark = [
    pytest.mark.usefixtures("vllm_loaded"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Words:
    """A tokenizer of which each word is a token; it counts what it decodes."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self.decoded = 0

    def token(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)

    def tokens(self, text: str) -> list[int]:
        return [self.token(word) for word in text.split(" ")]

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return " ".join(self._words[token] for token in tokens)


WORDS = Words()
END, EOM = WORDS.token("<end>"), WORDS.token("<eom>")
TAGGED = EndMarks(
    turn_ends=(END,), opener=WORDS.token("<call>"), before=' {"name": "', after='"',
    closers=("</call>",),
)  # fmt: skip
BARE = EndMarks(turn_ends=(END,), before='{"name": "', after='", "args":', closers=("}",))
LISTED = EndMarks(
    turn_ends=(END,), opener=WORDS.token("[CALLS]"), before='[{"name": "', after='", "args":',
    closers=("]",),
)  # fmt: skip
TEXTUAL = EndMarks(turn_ends=(END,), before="to=functions.", after="<", closers=("<|call|>",))
BY_TOKEN = EndMarks(turn_ends=(END,), call_ends=(EOM,))


def read(marks: EndMarks, text: str) -> Ending:
    return AnswerReader(marks, WORDS.decode).read(WORDS.tokens(text))


@pytest.mark.parametrize(
    ("marks", "text", "ending"),
    [
        (TAGGED, 'Sure. <call> {"name": "bash", "args": {}} </call> <end>', Ending(True, "bash")),
        (TAGGED, '<call> {"name":"bash"} </call> \n <end>', Ending(True, "bash")),
        (TAGGED, '<call> {"name": "bash"} </call>', Ending(True, "bash")),
        (TAGGED, 'A call is <call> {"name": "bash"} </call> as you see. <end>', END_OF_TURN),
        (TAGGED, "It ends with </call> <end>", END_OF_TURN),
        (TAGGED, "<call> nothing </call> <end>", Ending(True, None)),
        (TAGGED, '<call> {"name": "my secret text"} </call> <end>', Ending(True, None)),
        (TAGGED, "Done. <end>", END_OF_TURN),
        (TAGGED, "<end>", END_OF_TURN),
        (TAGGED, "Stopped by a word of the caller's", UNKNOWN),
        (BARE, '{"name": "bash", "args": {"a": "}"}} <end>', Ending(True, "bash")),
        (BARE, '{"name": "Bob", "age": {}} <end>', END_OF_TURN),
        (BARE, '{"name": "bash", "args": {}} is a call, {so it is} <end>', END_OF_TURN),
        (BARE, 'See {"name": "bash", "args": {}} <end>', END_OF_TURN),
        (LISTED, '[CALLS] [{"name": "bash", "args": {}}] <end>', Ending(True, "bash")),
        (LISTED, '[CALLS] [{"name": "bash", "args": {}}] , see [1] <end>', END_OF_TURN),
        (TEXTUAL, "Thoughts. to=functions.bash <json> {} <|call|>", Ending(True, "bash")),
        (TEXTUAL, "to=functions.bash <json> {} <|call|> was said. <end>", END_OF_TURN),
        (BY_TOKEN, "anything <eom>", Ending(True, None)),
        (BY_TOKEN, "anything <eom> else <end>", END_OF_TURN),
    ],
)
def test_an_answer_is_read_by_where_it_ends(marks: EndMarks, text: str, ending: Ending) -> None:
    assert read(marks, text) == ending


def test_of_several_calls_the_first_is_named() -> None:
    """A call's own arguments may speak of another one."""
    quoted = '<call> {"name": "write", "args": "<call> {"name": "bash"} </call> "} </call> <end>'
    assert read(TAGGED, quoted) == Ending(True, "write")
    both = '<call> {"name": "read"} </call> <call> {"name": "bash"} </call> <end>'
    assert read(TAGGED, both) == Ending(True, "read")


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ('[{"name": "bash", "parameters": {"a": "]x"}}] <end>', Ending(True, "bash")),
        ('[{"name":"bash", "parameters":{}}, {"name": "read", "parameters": {}}] <end>',
         Ending(True, "bash")),
        ('[{"name": "Bob", "age": 3}] <end>', UNKNOWN),
        ('{"city": "Paris"} <end>', UNKNOWN),
        ("yes <end>", UNKNOWN),
        ('<call> {"name": "bash"} </call> <end>', Ending(True, "bash")),
    ],
)  # fmt: skip
def test_in_an_answer_that_has_a_form_only_calls_are_understood(text: str, ending: Ending) -> None:
    assert AnswerReader(TAGGED, WORDS.decode).read_bound(WORDS.tokens(text)) == ending


def test_an_empty_answer_says_nothing() -> None:
    assert AnswerReader(TAGGED, WORDS.decode).read([]) == UNKNOWN


@pytest.mark.parametrize("marks", [TAGGED, BARE, LISTED, TEXTUAL])
@pytest.mark.parametrize(
    "end", [" prose <end>", " </call> <end>", " } <end>", " ] <end>", " <|call|>"]
)
def test_a_long_answer_is_decoded_in_small_part(marks: EndMarks, end: str) -> None:
    """However many openers an answer holds."""
    text = " ".join(["<call> [CALLS]", "word " * 20] * 2000) + f" {end}"
    answer = WORDS.tokens(text)
    before = WORDS.decoded
    AnswerReader(marks, WORDS.decode).read(answer)
    assert len(answer) > 40_000
    assert WORDS.decoded - before < 3000


MARKS = EndMarks(
    turn_ends=(2,), opener=7, before='{"name": "', after='"', closers=("]",), model="m"
)


def test_marks_arrive_as_they_were() -> None:
    assert read_marks(MARKS.text()) == MARKS
    assert configured_marks({ENDS_KEY: MARKS.text()}, {}) == MARKS
    assert configured_marks({}, {ENDS_VARIABLE: MARKS.text()}) == MARKS
    assert configured_marks({}, {}) is None


def test_marks_of_another_model_are_none() -> None:
    """An engine's environment may be that of a program with another engine."""
    assert MARKS.are_of("m")
    assert not MARKS.are_of("other")
    assert read_marks('{"turn_ends": [2]}').are_of("other")


@pytest.mark.parametrize(
    "text",
    ["nonsense", "[]", '{"turn_ends": [-1]}', '{"turn_ends": ["x"]}', '{"turn_ends": [], "no": 1}',
     '{"turn_ends": [1], "before": "' + "x" * 300 + '"}', "{" * 100_000],
)  # fmt: skip
def test_what_is_malformed_leaves_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert configured_marks({}, {ENDS_VARIABLE: text}) is None
    (warning,) = (record.getMessage() for record in caplog.records)
    assert f"{ENDS_VARIABLE}='{text[:9]}" in warning
    assert "allowed: 1, 0, or the tokens" in warning
    assert len(warning) < 500


@pytest.mark.parametrize("switch", ["0", "off", "1", "True"])
def test_a_switch_is_no_mark(switch: str, caplog: pytest.LogCaptureFixture) -> None:
    assert configured_marks({}, {ENDS_VARIABLE: switch}) is None
    assert not caplog.records


HERMES = FAMILIES[0]


@pytest.fixture
def hermes(tmp_path: Path, vllm_loaded: None) -> Any:
    """vLLM's configuration of an engine whose template calls tools."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return family_config(HERMES, write_family(HERMES, tmp_path / "hermes"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_understood(family: Family, tmp_path: Path) -> None:
    judged = judge(family, tmp_path / family.name, count=4, seed=7)
    assert judged.marks is not None
    assert judged.accuracy >= 0.99, (judged.wrong, judged.marks)
    assert judged.name_accuracy >= 0.95, (judged.misnamed, judged.marks)


@pytest.mark.filterwarnings("ignore")
def test_a_template_without_tool_calls_teaches_nothing(tmp_path: Path) -> None:
    """Its models may call tools in prose: that a turn ended then says nothing."""
    judged = judge(TOOLLESS, tmp_path / "toolless", count=2, seed=7)
    assert judged.marks is None
    assert set(judged.wrong) >= {"prose: unknown", "call: unknown"}
    assert not {kind for kind in judged.wrong if kind.startswith("cut")}, "a length is seen alone"


def test_marks_are_handed_to_the_connector(hermes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", "ipc:///tmp/somewhere")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    monkeypatch.delenv(ENDS_VARIABLE, raising=False)
    plugin.attach(hermes)
    marks = read_marks(hermes.kv_transfer_config.kv_connector_extra_config[ENDS_KEY])
    assert marks.closers == ("</tool_call>",)
    assert marks.model == hermes.model_config.model
    assert ENDS_VARIABLE not in os.environ


def test_beside_a_users_connector_the_environment_hands_them_over(
    hermes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", "ipc:///tmp/somewhere")
    monkeypatch.setenv(ENDS_VARIABLE, '{"turn_ends": [5], "model": "of another engine"}')
    monkeypatch.setenv("AITHER_KVCACHE_LAYERS", "1")  # handed over too, and put back afterwards
    user = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    hermes.kv_transfer_config = user
    plugin.attach(hermes)
    assert hermes.kv_transfer_config is user
    assert user.kv_connector_extra_config == {}
    assert read_marks(os.environ[ENDS_VARIABLE]).closers == ("</tool_call>",)


def test_an_operator_may_state_the_marks_or_forbid_reading(
    hermes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDS_VARIABLE, '{"turn_ends":[5],"call_ends":[6]}')
    assert read_marks(engine_marks(hermes)).call_ends == (6,)
    monkeypatch.setenv(ENDS_VARIABLE, "off")
    assert engine_marks(hermes) == ""


def test_the_template_of_the_command_line_teaches(
    hermes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EngineArgs.__dict__["from_cli_args"]
    monkeypatch.setattr(EngineArgs, "from_cli_args", original)  # put back afterwards
    remember_templates()
    remember_templates()
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE)
    literal = SimpleNamespace(model=hermes.model_config.model, chat_template=TEMPLATE)
    assert given_template(EngineArgs.from_cli_args(literal)) == TEMPLATE
    args = SimpleNamespace(model=hermes.model_config.model, chat_template=str(template))
    given = given_template(EngineArgs.from_cli_args(args))
    assert given == TEMPLATE
    monkeypatch.delenv(ENDS_VARIABLE, raising=False)
    assert read_marks(engine_marks(hermes, given)).closers == ("</my_call>",)
    assert given_template(EngineArgs(model=hermes.model_config.model)) is None


TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.tool_calls %}<my_call>{{ m.tool_calls[0].function.name }}
{{ m.tool_calls[0].function.arguments | tojson }}
</my_call>{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"""


LATE_END, CALL_END, NAME = 1, 2, 3
LATE_MARKS = EndMarks(
    turn_ends=(LATE_END,), call_ends=(CALL_END,), opener=9, before="to", after="!"
)
STOPPED = RequestFinished("r", b"", 4, 8, "finished_stopped")


def decode(tokens: Sequence[int]) -> str:
    return "".join("to bash!" if token == NAME else "." for token in tokens)


def asked(answer: Sequence[int], form: str | None = None) -> Any:
    tag = form if form and form.startswith("{") else None
    params = SimpleNamespace(structural_tag=tag, json=None if tag else "a form")
    request = SimpleNamespace(params=params) if form else None
    return SimpleNamespace(output_token_ids=answer, structured_output_request=request)


def told(
    event: RequestFinished, answer: Sequence[int], ends: AnswerEnds | None = None,
    form: str | None = None,
) -> Any:  # fmt: skip
    ends = ends or AnswerEnds(lambda: AnswerReader(LATE_MARKS, decode))
    queued = ends.of(event, asked(answer, form))
    return queued if isinstance(queued, RequestFinished) else queued.events()[0]


def changed(**fields: Any) -> RequestFinished:
    return msgspec.structs.replace(STOPPED, **fields)


CALLING, ENDING = (9, NAME, CALL_END), (5, LATE_END)


@pytest.mark.parametrize(
    ("said", "answer", "waiting", "tool"),
    [
        ({}, CALLING, True, "bash"),
        ({}, ENDING, False, None),
        ({}, (5, 6), None, None),
        ({"waiting_for_tool": True}, CALLING, True, "bash"),
        ({"waiting_for_tool": True, "tool": "mine"}, CALLING, True, "mine"),
        ({"tool": "mine"}, CALLING, True, "mine"),
        ({"waiting_for_tool": True}, ENDING, True, None),
        ({"waiting_for_tool": False}, CALLING, False, None),
        ({"session_ended": True}, CALLING, None, None),
        ({"reason": "finished_length_capped"}, CALLING, None, None),
        ({"reason": "finished_aborted"}, ENDING, None, None),
    ],
)
def test_a_callers_word_stands(
    said: dict[str, Any], answer: Sequence[int], waiting: bool | None, tool: str | None
) -> None:
    event = changed(**said)
    end = told(event, answer)
    assert (end.waiting_for_tool, end.tool) == (waiting, tool)
    assert end == msgspec.structs.replace(event, waiting_for_tool=waiting, tool=tool)


def test_an_answer_in_a_form_ends_for_nobody_knows_whom() -> None:
    assert told(STOPPED, ENDING, form="json").waiting_for_tool is None
    assert told(STOPPED, CALLING, form="json").tool == "bash"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize("model", sorted(SUPPORTED_STRUCTURAL_TAG_MODELS))
def test_an_answer_that_had_to_be_a_call_is_no_end_of_a_turn(model: str) -> None:
    """By the grammars that vLLM makes for the models that it knows."""
    named = {"type": "function", "function": {"name": "f"}}
    for tool, choice, waiting in (
        (STRICT, "auto", False),
        (TOOL, "required", None),
        (TOOL, ChatCompletionNamedToolChoiceParam(**named), None),
    ):
        tools = [ChatCompletionToolsParam(**tool)]  # type: ignore[arg-type]
        tag = get_model_structural_tag(model, tools, choice, reasoning=False)
        form = json.dumps(tag.model_dump())
        assert told(STOPPED, ENDING, form=form).waiting_for_tool is waiting, form
        assert told(STOPPED, CALLING, form=form).tool == "bash"


@pytest.mark.parametrize("tag", ["[" * 100_000, "3", "{", '{"format": NaN}'])
def test_a_form_that_cannot_be_read_counts_as_one(tag: str) -> None:
    assert is_bound(tag)


def test_an_error_costs_the_reading_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> AnswerReader:
        raise RuntimeError("a tokenizer that quotes a secret text")

    ends = AnswerEnds(fail)
    assert [told(STOPPED, CALLING, ends) for _ in range(3)] == [STOPPED] * 3
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_an_end_keeps_its_place_among_the_events() -> None:
    outbox = Outbox(limit=10, batch_limit=2)
    ends = AnswerEnds(lambda: AnswerReader(LATE_MARKS, decode))
    request = asked(CALLING)
    outbox.emit(BlocksCleared())
    outbox.emit(ends.of(STOPPED, request))
    outbox.emit(BlocksCleared())
    waiting = changed(waiting_for_tool=True, tool="bash")
    assert list(outbox) == [BlocksCleared(), waiting, BlocksCleared()]
    assert outbox.take_all() == [BlocksCleared(), waiting, BlocksCleared()]
