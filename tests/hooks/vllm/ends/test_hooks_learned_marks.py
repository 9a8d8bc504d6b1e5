"""Marks learned with vLLM's own renderer, for one family after another."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.requests.ends import read_marks
from kvgraph.hooks.settings import ENDS_KEY, ENDS_VARIABLE
from kvgraph.hooks.vllm import plugin
from kvgraph.hooks.vllm.api.learning import engine_marks
from kvgraph.hooks.vllm.patches import given_template, remember_templates
from kvgraph_bench.meaning.families import FAMILIES, TOOLLESS, Family
from kvgraph_bench.meaning.family_models import family_config, write_family
from kvgraph_bench.meaning.stops import judge

pytestmark = [
    pytest.mark.usefixtures("vllm_loaded"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
HERMES = FAMILIES[0]


@pytest.fixture
def hermes(tmp_path: Path, vllm_loaded: None) -> Any:
    """vLLM's configuration of an engine whose template calls tools."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return family_config(HERMES, write_family(HERMES, tmp_path / "hermes"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_understood(family: Family, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judged = judge(family, tmp_path / family.name, count=4, seed=7)
    assert judged.marks is not None
    assert judged.accuracy >= 0.99, (judged.wrong, judged.marks)
    assert judged.name_accuracy >= 0.95, (judged.misnamed, judged.marks)


def test_a_template_without_tool_calls_teaches_nothing(tmp_path: Path) -> None:
    """Its models may call tools in prose: that a turn ended then says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    from vllm.config import KVTransferConfig

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
    from vllm.engine.arg_utils import EngineArgs

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
