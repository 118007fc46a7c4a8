"""How families of models write reasoning and tool calls.

A tokenizer that ships a `response_template` says so itself. For the others a family is recognised by the markers in
its chat template, and has a response template here, in the form of transformers' `ResponseParser`. A template that has
no place for tools gets a prompt that explains the generic form (`text/tools.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One way to write tool calls.

    Attributes:
        name: of the family.
        call_open: markers that open a tool call; from the token that completes one, verification is strict.
        call_close: markers that close it again; empty if a call lasts to the end of the answer.
        template: response template for transformers' `ResponseParser`.
        json_body: the call's arguments are JSON, so a marker inside a JSON string is text.
        quote: what strings in a call are between, where that is not JSON's.
        before: what a call begins with, when it is forced; `{name}` is the tool's name.
        after: what it ends with.
        renders_tools: the chat template has a place for tools.
        reasons: the answer may begin with reasoning between `<think>` and `</think>`.
    """

    name: str
    call_open: tuple[str, ...]
    call_close: tuple[str, ...]
    template: Mapping[str, Any] = field(repr=False)
    json_body: bool = True
    quote: str = ""
    before: str = ""
    after: str = ""
    renders_tools: bool = True
    reasons: bool = False


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_REASONING = {"open": THINK_OPEN, "close": THINK_CLOSE, "content": "text", "repeats": True, "join": "\n"}
_LOOSE = {"allow_non_json": True}
"""What is no JSON comes back as the text it is, and is reported as an invalid call."""


_BARE = {
    "open_pattern": r'(?:\A|(?<=</think>))\s*(?:```(?:json|tool_call)?\s*)?(?=\{{1,2}\s*"name"\s*:)',
    "close": "```",
    "content": "json",
    "content_args": _LOOSE,
}
"""An answer that is a call without markers, in a fence or not, perhaps after reasoning: small models forget them.
Llama 3 does without."""


def _template(calls: Mapping[str, Any], **more: Mapping[str, Any]) -> dict[str, Any]:
    """A response template with these calls. Its anchor is in no text: the parser is given the answer's own start."""
    content = {"content": "text", "repeats": True, "join": ""}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "\N{NULL}",
        "fields": {
            "reasoning_content": _REASONING,
            "tool_calls": {"repeats": True, **calls},
            "bare_call": _BARE,
            **more,
            "content": content,
        },
    }


def _named(name: str) -> dict[str, Any]:
    """The value of a call whose name is outside its JSON."""
    return {"type": "function", "function": {"name": name, "arguments": "{content}"}}


HERMES = Family(
    "hermes",
    ("<tool_call>",),
    ("</tool_call>",),
    _template(
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "content_args": _LOOSE,
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    before='<tool_call>\n{{"name": {name}, "arguments": ',
    after="}\n</tool_call>",
)
"""Hermes, Qwen2.5, Qwen3 and many others; also the form that the fallback prompt asks for."""

QWEN_XML = Family(
    "qwen-xml",
    ("<tool_call>",),
    ("</tool_call>",),
    _template(
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": _named("{name}"),
        }
    ),
    json_body=False,
)
"""Qwen3-Coder and Qwen3.5: parameters in tags."""

LLAMA3 = Family(
    "llama3",
    ("<|python_tag|>",),
    (),
    _template(
        {
            "open": "<|python_tag|>",
            "content": "json",
            "content_args": _LOOSE,
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    before='{{"name": {name}, "parameters": ',
    after="}",
)
"""Llama 3.1 to 3.3: the answer is the call, in JSON, with or without a marker."""

MISTRAL = Family(
    "mistral",
    ("[TOOL_CALLS]",),
    (),
    _template(
        {
            "open_pattern": (
                r"\s*\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)|(?P<name>)(?=\[\s*\{))"
            ),
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "content": "json",
            "content_args": _LOOSE,
            "transform": _named("{name}"),
        }
    ),
    before='[TOOL_CALLS] [{{"name": {name}, "arguments": ',
    after="}]",
)
"""Mistral: a JSON list of calls, or since its eleventh tokenizer a name and arguments."""

DEEPSEEK = Family(
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("<｜tool▁calls▁end｜>",),
    _template(
        {
            "open_pattern": (
                r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
                r"(?P<name>[^<\n]+?)(?:<｜tool▁sep｜>|\s*\n\s*```json\s*\n)(?=\s*\{)"
            ),
            "close_pattern": r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
            "content": "json",
            "content_args": _LOOSE,
            "transform": _named("{name}"),
        },
        ignored={"open": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"], "close_pattern": "(?=)", "repeats": True},
    ),
    before="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{bare}\n```json\n",
    after="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
"""DeepSeek V3 and R1 (a fenced block), and V3.1 (bare JSON)."""

GEMMA = Family(
    "gemma",
    ("<|tool_call>",),
    ("<tool_call|>",),
    _template(
        {
            "open_pattern": r"\s*<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {**_LOOSE, "unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": _named("{name}"),
        }
    ),
    json_body=False,
    quote='<|"|>',
)
"""Gemma 4: bare keys, strings between markers of their own."""

_MARKS = (
    (r"<function=", QWEN_XML),
    (r"<tool_call>", HERMES),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<｜tool▁call", DEEPSEEK),
    (r"<\|tool_call>", GEMMA),
    (r"<\|python_tag\|>|<\|start_header_id\|>", LLAMA3),
)
"""(what is looked for in a chat template, whose family it is); the first that is found counts."""


def family_of(tokenizer: Any) -> Family:
    """The family of a model, by what its tokenizer ships, else by the markers in its chat template."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default") or ""
    text = str(template or "")
    renders = re.search(r"\btools\b", text) is not None
    family = next((family for mark, family in _MARKS if renders and re.search(mark, text)), HERMES)
    shipped = getattr(tokenizer, "response_template", None)
    reasons = THINK_CLOSE in text or "reasoning_content" in text
    return Family(
        name=family.name if shipped is None else "shipped",
        call_open=family.call_open,
        call_close=family.call_close,
        template=family.template if shipped is None else shipped,
        json_body=family.json_body,
        quote=family.quote,
        before=family.before,
        after=family.after,
        renders_tools=renders,
        reasons=reasons,
    )
