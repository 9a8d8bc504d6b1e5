"""Model families, each by its chat template, its own tokens, and how it writes and ends answers."""

from __future__ import annotations

import functools
import json
import pydoc_data.topics
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


Writer = Callable[[Sequence[Call], bool], str]


def _json(value: object, dense: bool) -> str:
    separators = (",", ":") if dense else (", ", ": ")
    return json.dumps(value, separators=separators, ensure_ascii=False)


def hermes(calls: Sequence[Call], dense: bool) -> str:
    """A JSON object between two tags."""
    bodies = [_json({"name": c.name, "arguments": c.arguments}, dense) for c in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen_coder(calls: Sequence[Call], dense: bool) -> str:
    """A tag for each function and for each parameter."""
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def llama(calls: Sequence[Call], dense: bool) -> str:
    """A bare JSON object, one for an answer."""
    return _json({"name": calls[0].name, "parameters": calls[0].arguments}, dense)


def pythonic(calls: Sequence[Call], dense: bool) -> str:
    """A list of Python calls."""
    comma = "," if dense else ", "
    bodies = [
        f"{call.name}({comma.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]
    return f"[{comma.join(bodies)}]"


def mistral(calls: Sequence[Call], dense: bool) -> str:
    """A JSON list behind one token."""
    listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return "[TOOL_CALLS]" + ("" if dense else " ") + _json(listed, dense)


def deepseek(calls: Sequence[Call], dense: bool) -> str:
    """A code block between tokens."""
    bodies = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{_json(call.arguments, dense)}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(bodies) + "<｜tool▁calls▁end｜>"


def dsml(calls: Sequence[Call], dense: bool) -> str:
    """Tags that are half a token."""
    bodies = [
        f'<｜DSML｜invoke name="{call.name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n'
            for key, value in call.arguments.items()
        )
        + "</｜DSML｜invoke>"
        for call in calls
    ]
    return "<｜DSML｜function_calls>\n" + "\n".join(bodies) + "\n</｜DSML｜function_calls>"


def phi(calls: Sequence[Call], dense: bool) -> str:
    """A JSON list between two tokens."""
    listed = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return f"<|tool_call|>{_json(listed, dense)}<|/tool_call|>"


def harmony(calls: Sequence[Call], dense: bool) -> str:
    """A message to a function, on a channel of its own."""
    body = _json(calls[0].arguments, dense)
    thought = "<|channel|>analysis<|message|>The user wants this done.<|end|><|start|>assistant"
    head = f"<|channel|>commentary to=functions.{calls[0].name} <|constrain|>json<|message|>"
    return thought + head + body


def glm(calls: Sequence[Call], dense: bool) -> str:
    """Tags for keys and values."""
    return "\n".join(
        f"<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def kimi(calls: Sequence[Call], dense: bool) -> str:
    """Numbered functions between tokens."""
    bodies = [
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>"
        f"{_json(call.arguments, dense)}<|tool_call_end|>"
        for number, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(bodies) + "<|tool_calls_section_end|>"


def granite(calls: Sequence[Call], dense: bool) -> str:
    """A JSON list behind one token, and nothing behind it."""
    listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return "<|tool_call|>" + _json(listed, dense)


def gemma(calls: Sequence[Call], dense: bool) -> str:
    """Values between tokens."""
    return "".join(
        f"<start_function_call>call:{call.name}{{"
        + ",".join(f"{key}:<escape>{value}<escape>" for key, value in call.arguments.items())
        + "}<end_function_call>"
        for call in calls
    )


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # of the family, and of its template's file unless ``template`` is another
    write: Writer  # writes calls as its models do
    special: tuple[str, ...]  # its own tokens
    end: str  # the token that its tokenizer calls the end
    turn_end: str  # what a model says at the end of its turn
    call_end: str  # what it says behind a call
    many: bool = True  # whether an answer may hold several calls
    prose: bool = True  # whether a call may stand behind prose
    # whether its tokens begin with the space before them, as SentencePiece has it
    spaces: bool = False
    mode: str = "hf"  # vLLM's mode of the tokenizer; other than ``hf``, vLLM renders in Python
    template: str | None = ""  # its template's file; None: it has none
    opens_prose: str = ""  # what stands before an answer in prose

    @property
    def template_file(self) -> str | None:
        """The name of its template's file; None if it has none."""
        return None if self.template is None else f"{self.template or self.name}.jinja"


_CHATML: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CALL_TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_DEEPSEEK: Final = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
_DEEPSEEK_TOOLS: Final = tuple(
    f"<｜tool▁{what}｜>"
    for what in (
        "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin",
        "outputs▁end", "output▁begin", "output▁end",
    )
)  # fmt: skip
_MISTRAL: Final = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip

FAMILIES: Final = (
    Family("hermes", hermes, (*_CHATML, *_CALL_TAGS), "<|im_end|>", "<|im_end|>",
           "<|im_end|>"),
    Family("chatml_text", hermes, _CHATML, "<|endoftext|>", "<|im_end|>", "<|im_end|>",
           template="hermes"),
    Family("qwen_coder", qwen_coder, (*_CHATML, *_CALL_TAGS), "<|im_end|>", "<|im_end|>",
           "<|im_end|>"),
    Family("llama", llama,
           ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
           "<|eot_id|>", "<|eot_id|>", "<|eot_id|>", many=False, prose=False),
    Family("pythonic", pythonic,
           ("<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
           "<|eot|>", "<|eot|>", "<|eot|>", prose=False),
    Family("mistral", mistral, _MISTRAL, "</s>", "</s>", "</s>", spaces=True),
    Family("tekken", mistral, _MISTRAL, "</s>", "</s>", "</s>", mode="mistral",
           template=None),
    Family("deepseek", deepseek, (*_DEEPSEEK, *_DEEPSEEK_TOOLS), "<｜end▁of▁sentence｜>",
           "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    Family("deepseek_v32", dsml, (*_DEEPSEEK, "<think>", "</think>", "｜DSML｜"),
           "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
           mode="deepseek_v32", template=None),
    Family("phi", phi,
           ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
            "<|/tool_call|>", "<|tool_response|>", "<|end|>", "<|endoftext|>"),
           "<|endoftext|>", "<|end|>", "<|end|>", spaces=True),
    Family("harmony", harmony,
           ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>",
            "<|call|>"),
           "<|return|>", "<|return|>", "<|call|>", many=False,
           opens_prose="<|channel|>final<|message|>"),
    Family("glm", glm,
           ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
            "<|endoftext|>", *_CALL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>"),
           "<|endoftext|>", "<|user|>", "<|observation|>"),
    Family("kimi", kimi,
           ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[EOS]"),
           "[EOS]", "<|im_end|>", "<|im_end|>"),
    Family("granite", granite,
           ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
           "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
    Family("gemma", gemma,
           ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_call>",
            "<end_function_call>", "<start_function_response>", "<end_function_response>",
            "<escape>"),
           "<eos>", "<end_of_turn>", "<start_function_response>", spaces=True),
)  # fmt: skip
"""All of them call tools by a form of their own."""

TOOLLESS: Final = Family(
    "toolless", hermes, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>", "<end_of_turn>", "<end_of_turn>", spaces=True,
)  # fmt: skip
"""Its template has no form for tool calls, and system texts stand in a user's turn."""

ZEPHYR: Final = Family("zephyr", hermes, ("<s>", "</s>"), "</s>", "</s>", "</s>", spaces=True)
"""Zephyr's and TinyLlama's: roles are plain text, and no special token begins a prompt."""


_TEMPLATES: Final = Path(__file__).parent / "templates"
_TEKKEN: Final = "data/tekken_240911.json"  # in mistral_common: Mistral's own, of its third version
_VOCABULARY: Final = 2048
_TEXTS: Final = 60  # of Python's own documentation, from which tokens are learned


def corpus() -> list[str]:
    """Prose and code, the same on every machine with this Python."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)[:_TEXTS]]


def write_family(family: Family, directory: Path) -> Path:
    directory.mkdir(parents=True)
    if family.mode == "mistral":
        spec = find_spec("mistral_common")
        assert spec is not None, "vLLM needs it"
        assert spec.origin is not None
        shutil.copy(Path(spec.origin).parent / _TEKKEN, directory / "tekken.json")
        end = family.special.index(family.end) + 1  # there they are numbered from 1 on
    else:
        end = write_tokenizer(family, directory)
    config = {**_CONFIG, "bos_token_id": end, "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def family_config(family: Family, directory: Path) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(directory), tokenizer_mode=family.mode, dtype="float32", enforce_eager=True,
        max_model_len=2048, config_format="hf", load_format="dummy",
    ).create_engine_config()  # fmt: skip


class FamilyWriter:
    """Turns what a model of a family writes into its tokens."""

    def __init__(self, family: Family, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = sorted(family.special, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, known)) + ")")

    def tokens(self, text: str, special: bool = True) -> list[int]:
        pattern = self._special if special else _OPEN
        tokens: list[int] = []
        for piece in filter(None, pattern.split(text)):
            if special and pattern.fullmatch(piece):
                tokens.append(self._tokenizer.convert_tokens_to_ids(piece))
            else:
                tokens += self._tokenizer.encode(piece, add_special_tokens=False)
        return tokens


_OPEN: Final = re.compile(r"(?<=[<\[])")  # cut here, the name of a special token is mere letters
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 131072,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip


def write_tokenizer(family: Family, directory: Path) -> int:
    """Write a family's made tokenizer and template; returns the token that ends its texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(_trained(family.spaces))
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.special[0],
        "eos_token": family.end,
        "clean_up_tokenization_spaces": False,
    }
    if (name := family.template_file) is not None:
        settings["chat_template"] = (_TEMPLATES / name).read_text()
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id(family.end)
    assert end is not None, f"{family.name} has no {family.end}"
    return int(end)


@functools.cache  # many families have the same
def _trained(spaces: bool) -> str:
    """Byte pairs over bytes, or over letters with the space before them as SentencePiece has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if spaces:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fallback = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        tokenizer.decoder = fallback
        alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=alphabet, show_progress=False,
        initial_alphabet=[] if spaces else pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus(), trainer)
    return str(tokenizer.to_str())
