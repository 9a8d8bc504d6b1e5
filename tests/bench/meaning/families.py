"""Model families, each by its chat template, its own tokens, and how it writes and ends answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from . import call_texts as texts
from .call_texts import Writer


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    Attributes:
        name: Of the family, and of its template's file unless ``template`` is another.
        write: Writes calls as its models do.
        special: Its own tokens.
        end: The token that its tokenizer calls the end.
        turn_end: What a model says at the end of its turn.
        call_end: What it says behind a call.
        many: Whether an answer may hold several calls.
        prose: Whether a call may stand behind prose.
        spaces: Whether its tokens begin with the space before them, as SentencePiece has it.
        mode: vLLM's mode of the tokenizer; other than ``hf``, vLLM renders in Python.
        template: Its template's file; None: it has none.
        opens_prose: What stands before an answer in prose.
    """

    name: str
    write: Writer
    special: tuple[str, ...]
    end: str
    turn_end: str
    call_end: str
    many: bool = True
    prose: bool = True
    spaces: bool = False
    mode: str = "hf"
    template: str | None = ""
    opens_prose: str = ""

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
    Family("hermes", texts.hermes, (*_CHATML, *_CALL_TAGS), "<|im_end|>", "<|im_end|>",
           "<|im_end|>"),
    Family("chatml_text", texts.hermes, _CHATML, "<|endoftext|>", "<|im_end|>", "<|im_end|>",
           template="hermes"),
    Family("qwen_coder", texts.qwen_coder, (*_CHATML, *_CALL_TAGS), "<|im_end|>", "<|im_end|>",
           "<|im_end|>"),
    Family("llama", texts.llama,
           ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
           "<|eot_id|>", "<|eot_id|>", "<|eot_id|>", many=False, prose=False),
    Family("pythonic", texts.pythonic,
           ("<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
           "<|eot|>", "<|eot|>", "<|eot|>", prose=False),
    Family("mistral", texts.mistral, _MISTRAL, "</s>", "</s>", "</s>", spaces=True),
    Family("tekken", texts.mistral, _MISTRAL, "</s>", "</s>", "</s>", mode="mistral",
           template=None),
    Family("deepseek", texts.deepseek, (*_DEEPSEEK, *_DEEPSEEK_TOOLS), "<｜end▁of▁sentence｜>",
           "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    Family("deepseek_v32", texts.dsml, (*_DEEPSEEK, "<think>", "</think>", "｜DSML｜"),
           "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
           mode="deepseek_v32", template=None),
    Family("phi", texts.phi,
           ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
            "<|/tool_call|>", "<|tool_response|>", "<|end|>", "<|endoftext|>"),
           "<|endoftext|>", "<|end|>", "<|end|>", spaces=True),
    Family("harmony", texts.harmony,
           ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>",
            "<|call|>"),
           "<|return|>", "<|return|>", "<|call|>", many=False,
           opens_prose="<|channel|>final<|message|>"),
    Family("glm", texts.glm,
           ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
            "<|endoftext|>", *_CALL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>"),
           "<|endoftext|>", "<|user|>", "<|observation|>"),
    Family("kimi", texts.kimi,
           ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[EOS]"),
           "[EOS]", "<|im_end|>", "<|im_end|>"),
    Family("granite", texts.granite,
           ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
           "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
    Family("gemma", texts.gemma,
           ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_call>",
            "<end_function_call>", "<start_function_response>", "<end_function_response>",
            "<escape>"),
           "<eos>", "<end_of_turn>", "<start_function_response>", spaces=True),
)  # fmt: skip
"""All of them call tools by a form of their own."""

TOOLLESS: Final = Family(
    "toolless", texts.hermes, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>", "<end_of_turn>", "<end_of_turn>", spaces=True,
)  # fmt: skip
"""Its template has no form for tool calls."""
