"""An answer's text to its parts: content, reasoning and tool calls, as they are committed.

transformers' `ResponseParser` finds the parts, by the response template of the model's family; this module makes it
safe to stream from. Characters are fed one at a time, so the result does not depend on how tokens were grouped. A
marker inside a JSON string is hidden from the parser, so a call may talk about calls. What cannot be parsed becomes an
invalid call with its raw text; nothing raises.
"""

from __future__ import annotations

import json
import logging
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fly_llm.text.families import THINK_OPEN, Family
from fly_llm.types import InvalidToolCall, ToolCall

logger = logging.getLogger("fly_llm")

_HIDDEN = {ord(char): 0xE000 + ord(char) for char in "<[|;`"}
"""First characters of markers, and what stands for them inside a JSON string (the private use area of Unicode)."""
_HIDDEN_QUOTED = {ord("_"): 0xE000 + ord("_")}
"""The same where strings have quotes that begin like markers, but hold none of this."""
_SHOWN = {hidden: char for char, hidden in (_HIDDEN | _HIDDEN_QUOTED).items()}
_LONGEST_OPENER = 400
_OF_CALLS = ("tool_calls", "bare_call", "ignored")
"""Fields of a response template that nobody looks for where there are no tools."""
_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Attributes:
        kind: what it is.
        text: of content and reasoning: what is new; of calls: their raw text.
        call: the call, of "call" and "invalid".
    """

    kind: Literal["content", "reasoning", "call", "invalid"]
    text: str = ""
    call: ToolCall | InvalidToolCall | None = None


class Reader:
    """Reads one answer.

    Args:
        family: how the model writes.
        opened: the end of the prompt that is already part of the answer, `<think>` for one.
        tools: the tools of the request, in OpenAI's form; arguments are converted to the types of their schemas.
        calls: whether tool calls are looked for.
        forced: the answer is a call, under a grammar; one that is cut short is invalid, with or without a marker.
    """

    def __init__(
        self,
        family: Family,
        *,
        opened: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
        calls: bool = True,
        forced: bool = False,
    ) -> None:
        self._forced = forced
        template = dict(family.template)
        if not calls:
            fields = template["fields"].items()
            template["fields"] = {name: value for name, value in fields if name not in _OF_CALLS}
        self._family = family
        self._template = template
        self._tools: list[Any] = list(tools or [])
        self._schemas: dict[str, Any] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self._tools
        }
        self._seen: list[str] = []  # the answer so far, behind reasoning, until it is known whether it is a bare call
        self._region = ""  # the field that is open
        self._raw = ""  # its text
        self._opener = ""  # what opened it
        self._last = ""  # the last characters, which hold what opened a field when it opens
        self._quoted = self._escaped = False  # within a JSON string of a call
        self._skip_space = False
        self._cut = False  # the answer ended within a call
        self._spec, self._parser = self._new_parser(opened)
        for event in self._parser.initial_events:
            if event["type"] == "region_open":
                self._region = event["field"]

    def _new_parser(self, prefix: str) -> tuple[Any, Any]:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(self._template)
        return spec, ResponseParser(spec, prefix=prefix, tools=self._tools)

    def push(self, text: str) -> list[Piece]:
        """Takes the next characters. Returns what became certain with them."""
        return [piece for char in text for piece in self._push(char)]

    def finish(self) -> list[Piece]:
        """The answer is over. Returns what was held, a call that was never closed as invalid."""
        pieces: list[Piece] = []
        self._cut = self._is_cut()
        try:
            _, events = self._parser.finalize()
            pieces.extend(self._pieces(events))
        except Exception as error:  # whatever a shipped template's parser thinks of half a call
            pieces.extend(self._lost(error))
        return pieces

    def _is_cut(self) -> bool:
        """Whether a call that the answer ends in is cut short. JSON shows by itself that it is whole."""
        field = self._spec.fields.get("tool_calls")
        if field is None or field.content == "json" or field.close_re is None:
            return False
        return all(match.end() < len(self._last) for match in field.close_re.finditer(self._last))

    def _push(self, char: str) -> Iterator[Piece]:
        fed = char
        self._last = (self._last + char)[-_LONGEST_OPENER:]
        if self._region != "content":
            self._seen.append(char)
        if self._region == "bare_call" or (self._region == "tool_calls" and self._family.json_body):
            fed = self._hide(char)
        elif self._region == "tool_calls" and self._family.quote:
            self._quoted ^= self._last.endswith(self._family.quote)
            fed = char.translate(_HIDDEN_QUOTED) if self._quoted else char
        try:
            events = self._parser.feed(fed)
        except Exception as error:
            rest = self._behind_close()
            yield from self._lost(error)
            self._spec, self._parser = self._new_parser("")
            self._seen.clear()
            yield from (piece for char in rest for piece in self._push(char))
            return
        yield from self._pieces(events)

    def _hide(self, char: str) -> str:
        """The character, or its stand-in if it is inside a JSON string. A string ends with its line."""
        inside = self._quoted
        if self._escaped:
            self._escaped = False
        elif inside and char == "\\":
            self._escaped = True
        elif char == '"' or (inside and char == "\n"):
            self._quoted = not inside
        return char.translate(_HIDDEN) if inside else char

    def _pieces(self, events: list[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._region, self._raw, self._opener = name, "", self._opener_of(name)
                self._quoted = self._escaped = False
            elif event["type"] == "region_chunk":
                text = event["text"].translate(_SHOWN)
                self._raw += text
                if name == "reasoning_content" and (text := text if self._raw.strip() else ""):
                    yield Piece("reasoning", text)
                elif name == "content" and (text := self._without_space(text)):
                    yield Piece("content", text)
            else:
                self._skip_space = self._skip_space or name not in ("content", "bare_call")
                if name == "reasoning_content":
                    self._seen.clear()
                elif name == "tool_calls":
                    yield from self._calls(self._raw if self._cut else event["value"])
                elif name == "bare_call":
                    yield from self._bare(event["value"])
                self._region = ""

    def _opener_of(self, name: str) -> str:
        """The text that has just opened a field."""
        pattern = self._spec.fields[name].open_re
        found = [match.group().lstrip() for match in pattern.finditer(self._last)] if pattern is not None else []
        return found[-1] if found else ""

    def _behind_close(self) -> str:
        """The last characters, which come after what closed the field that is open."""
        pattern = self._spec.fields[self._region].close_re if self._region else None
        ends = [match.end() for match in pattern.finditer(self._last)] if pattern is not None else []
        return self._last[ends[-1] :] if ends else ""

    def _without_space(self, text: str) -> str:
        """Content without the space that parts it from reasoning or a call before it."""
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        return text

    def _lost(self, error: Exception) -> Iterator[Piece]:
        """What to make of a region that the parser cannot close."""
        logger.debug("a tool call could not be parsed: %s", error)
        if self._region == "tool_calls":
            yield from self._calls(self._raw)
        elif self._region == "bare_call":
            yield from self._bare(self._raw)
        self._region = ""

    def _found(self, value: Any) -> list[tuple[str, dict[str, Any]]]:
        """The calls in a value, their arguments in the types of the tools' schemas."""
        try:
            return [(name, _typed(arguments, self._schemas.get(name, {}))) for name, arguments in _calls_of(value)]
        except RecursionError:
            return []  # brackets in brackets in brackets, as a model writes them that repeats itself

    def _bare(self, value: Any) -> Iterator[Piece]:
        """A call without markers, if it is one of the tools; else the answer simply began like one."""
        found = self._found(value)
        text = "".join(self._seen)
        if found and all(name in self._schemas for name, _ in found):
            self._skip_space = True
            yield from _call_pieces(text, found)
        elif self._forced:  # the grammar allowed nothing else, so it was cut
            yield Piece("invalid", text, InvalidToolCall(new_id(), text, "it is cut short"))
        elif text := self._without_space(text):
            yield Piece("content", text)

    def _calls(self, value: Any) -> Iterator[Piece]:
        """The call, or the calls, of a region."""
        found = self._found(value)
        if found:
            yield from _call_pieces(self._raw, found)
            return
        raw = self._raw
        for marker in self._family.call_open:  # a stray marker: the call is behind the last one
            head, stray, tail = raw.rpartition(marker)
            found = self._found({"function": tail}) if stray else []
            if found:
                if text := head.strip():
                    yield Piece("content", text)
                yield from _call_pieces(tail, found)
                return
        problem = "it is not a JSON object with a name and arguments"
        yield Piece("invalid", raw, InvalidToolCall(new_id(), self._opener + raw, problem))


def _call_pieces(raw: str, found: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Piece]:
    """The calls of one region, whose text goes with the first."""
    for i, (name, arguments) in enumerate(found):
        yield Piece("call", "" if i else raw, ToolCall(new_id(), name, arguments))


def _parsed(text: str) -> Any:
    """The JSON values of a text that holds nothing else: one, or a list of several; None if it holds more."""
    text = text.strip()
    if text.startswith("{{"):  # copied from a prompt whose braces were doubled by mistake
        return _values(text[1:]) or (_values(text[1:-1]) if text.endswith("}}") else None)
    return _values(text)


def _values(text: str) -> Any:
    """`_parsed`, braces as they are."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return None
        values.append(value)
        while at < len(text) and text[at] in " \t\r\n,;":
            at += 1
    return values[0] if len(values) == 1 else values or None


def _calls_of(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments) of what a parser made of a region, in whatever way families nest them; nothing if it is none.

    All or nothing: where one of several is no call, there is no telling what the model meant.
    """
    found = _collect(value)
    if found and all(call is not None for call in found):
        yield from (call for call in found if call is not None)


def _collect(value: Any) -> list[tuple[str, dict[str, Any]] | None]:
    value = _shown(value)
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, list):
        return [call for item in value for call in _collect(item)]
    if not isinstance(value, dict):
        return [None]
    if "function" in value and not {"arguments", "parameters"} & value.keys():
        return _collect(value["function"])
    name, arguments = value.get("name") or value.get("function"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not name and isinstance(arguments, list):  # a list of whole calls where arguments were expected
        return _collect(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return [None]
    return [(name, arguments)]


def _typed(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with numbers and booleans that were written as strings, where the schema takes no string."""
    properties: Any = schema.get("properties")
    typed = dict(arguments)
    if not isinstance(properties, Mapping):
        return typed
    for name, value in arguments.items():
        wanted = properties.get(name)
        named = wanted.get("type") if isinstance(wanted, Mapping) else None
        kinds = {named} if isinstance(named, str) else set(named or ())
        if isinstance(value, str) and kinds and "string" not in kinds:
            read = _parsed(value.strip().lower() if "boolean" in kinds else value)
            if read is not None and _KINDS.get(type(read), "") in kinds | ({"integer"} if "number" in kinds else set()):
                typed[name] = read
    return typed


_KINDS = {int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def _shown(value: Any) -> Any:
    """The value with hidden characters shown again, in keys too."""
    if isinstance(value, str):
        return value.translate(_SHOWN)
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return value


def new_id() -> str:
    """A new id of a call: nine letters and digits, which every family's template takes."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


def opened_by(prompt_end: str) -> str:
    """What of an answer a prompt has begun already."""
    return THINK_OPEN if prompt_end.rstrip().endswith(THINK_OPEN) else ""
