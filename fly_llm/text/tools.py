"""Tools in a request: what may be called, what a template is told that has no place for them, what form is forced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fly_llm.errors import ConfigError
from fly_llm.text.constrain import choice_grammar, json_grammar, json_rule, regex_grammar
from fly_llm.text.families import THINK_CLOSE, Family

_PROMPT = (
    "You may call one or more functions to help with the request. The functions, as JSON schemas:\n{tools}\n\n"
    "To call a function, write a JSON object with its name and arguments between tags:\n"
    '<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>'
)
"""What a model is told whose chat template has no place for tools: the form of the Hermes family."""


@dataclass(frozen=True)
class Structure:
    """What form an answer must have.

    Attributes:
        tools: tools that may be called, in OpenAI's form.
        choice: "auto", "none", "required", or the name of a tool that must be called.
        parallel: a forced answer may hold several calls.
        response_format: the form of an answer that calls no tool, in OpenAI's form; None is free.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = False
    response_format: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Structure:
        """From a request's `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`.

        Raises:
            ConfigError: one of them is malformed, or names a tool that is not there.
        """
        tools = tuple(_tool(tool) for tool in options.get("tools") or ())
        names = [tool["function"]["name"] for tool in tools]
        return cls(
            tools,
            _choice(options.get("tool_choice"), names),
            bool(options.get("parallel_tool_calls", False)),
            _response_format(options.get("response_format")),
        )

    @property
    def visible_tools(self) -> list[dict[str, Any]]:
        """The tools the model is told of."""
        return [] if self.choice == "none" else [dict(tool) for tool in self.tools]

    @property
    def is_forced(self) -> bool:
        """The answer must be a call."""
        return self.choice not in ("auto", "none")

    def grammar(self, tokenizer: Any, family: Family, *, opened: str) -> str | None:
        """The grammar of the answer, or None if it is free.

        Args:
            tokenizer: the target's.
            family: how it writes calls.
            opened: what of the answer the prompt has begun already; reasoning is let finish first.
        """
        answer = None if self.is_forced or self.response_format is None else _format_grammar(self.response_format)
        if self.is_forced:
            names = None if self.choice == "required" else {self.choice}
            calls = [tool["function"] for tool in self.tools if names is None or tool["function"]["name"] in names]
            rules = _call_rules(tokenizer, family, calls, parallel=self.parallel)
        elif answer is not None:
            rules = answer.replace("start:", "answer:", 1)
            if self.visible_tools and not family.before:
                raise ConfigError(
                    f"response_format together with tools is not possible for models of the {family.name} family, "
                    "whose calls no grammar is written for: give one of them"
                )
            if self.visible_tools:
                calls = [tool["function"] for tool in self.tools]
                rules = rules.replace("answer:", "free:", 1)
                rules += _call_rules(tokenizer, family, calls, parallel=True).replace("answer:", "calls:", 1)
                rules += "answer: free | calls\n"
        else:
            return None
        if not (family.reasons and opened):
            return f"start: answer\n{rules}"
        close = _marker(tokenizer, THINK_CLOSE)
        think = (
            f"think: THOUGHT {close}\nTHOUGHT: /(?s:.*)/\n"
            if close.startswith("<[")
            else f"think[suffix={close}]: /(?s:.*)/\n"
        )
        return f"start: think SPACE? answer\n{think}SPACE: /[ \\n\\r\\t]+/\n{rules}"


FREE = Structure()


def _tool(tool: Any) -> Mapping[str, Any]:
    """A tool in OpenAI's form."""
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(
            "a tool must be a dict like {'type': 'function', 'function': {'name': ..., 'description': ..., "
            f"'parameters': {{JSON schema}}}}}}, got {tool!r:.200}"
        )
    return {**tool, "type": "function"}


def _choice(given: Any, names: Sequence[str]) -> str:
    """`tool_choice` in any of the forms that are in use, as one word."""
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else given.get("name")
        given = name if name is not None else given.get("type")
    words = {None: "auto", False: "none", True: "required", "any": "required"}
    choice = words.get(given, given) if given is None or isinstance(given, (bool, str)) else None
    if not isinstance(choice, str) or choice not in ("auto", "none", "required", *names):
        known = ", ".join(map(repr, ("auto", "none", "required", "any", *names)))
        raise ConfigError(
            f"tool_choice must be one of {known}, a bool, or a dict that names a tool, got {given!r:.200}"
        )
    if choice == "required" and not names:
        raise ConfigError("tool_choice='required' needs tools, and there are none")
    return choice


def _response_format(given: Any) -> Mapping[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not _is_format(kind, given):
        raise ConfigError(
            "response_format must be {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
            "{'type': 'regex', 'regex': ...}, {'type': 'choice', 'choices': [...]} or "
            f"{{'type': 'grammar', 'grammar': (Lark)}}, got {given!r:.200}"
        )
    return None if kind == "text" else given


def _is_format(kind: Any, given: Any) -> bool:
    if kind == "json_schema":
        return isinstance(_schema(given), Mapping)
    if kind == "choice":
        return bool(given.get("choices")) and all(isinstance(one, str) and one for one in given["choices"])
    if kind in ("regex", "grammar"):
        return isinstance(given.get(kind), str)
    return kind in ("text", "json_object")


def _schema(response_format: Mapping[str, Any]) -> Any:
    wrapped = response_format.get("json_schema")
    return wrapped.get("schema", wrapped) if isinstance(wrapped, Mapping) else response_format.get("schema")


def _format_grammar(response_format: Mapping[str, Any]) -> str:
    kind = response_format["type"]
    if kind == "regex":
        return regex_grammar(response_format["regex"])
    if kind == "choice":
        return choice_grammar(response_format["choices"])
    if kind == "grammar":
        return str(response_format["grammar"])
    return json_grammar({"type": "object"} if kind == "json_object" else _schema(response_format))


def _call_rules(tokenizer: Any, family: Family, functions: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
    """Rules for `answer`: a call of one of these functions, or several."""
    if not family.before:
        raise ConfigError(
            f"tool calls of the {family.name} family cannot be forced: use tool_choice='auto', or another model"
        )
    rules, names = [], []
    for i, function in enumerate(functions):
        name = json.dumps(function["name"], ensure_ascii=False)
        before = _literal(tokenizer, family, family.before.format(name=name, bare=function["name"]))
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rules.append(f"call{i}: {before} arguments{i} {_literal(tokenizer, family, family.after)}\n")
        rules.append(f"arguments{i}: {json_rule(schema)}\n")
        names.append(f"call{i}")
    more = ' ("\\n" call)*' if parallel and family.call_close else ""
    return f"answer: call{more}\ncall: {' | '.join(names)}\n{''.join(rules)}"


def _literal(tokenizer: Any, family: Family, text: str) -> str:
    """A text in a grammar, its markers as the tokens they are."""
    parts, rest = [], text
    markers = sorted((*family.call_open, *family.call_close, *_ADDED), key=len, reverse=True)
    while rest:
        at, marker = min(((rest.find(marker), marker) for marker in markers if marker in rest), default=(len(rest), ""))
        if at:
            parts.append(json.dumps(rest[:at], ensure_ascii=False))
        if marker:
            parts.append(_marker(tokenizer, marker))
        rest = rest[at + len(marker) :]
    return " ".join(parts)


_ADDED = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


def _marker(tokenizer: Any, marker: str) -> str:
    """A marker in a grammar: by its id where it is one added token, which the grammar knows by id alone.

    llguidance takes an added token for text where it is not special and not in angle brackets; by its id, it could not
    be rolled back.
    """
    ids = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    number, special = ids.get(marker, (None, False))
    by_id = number is not None and (special or (marker.startswith("<") and marker.endswith(">")))
    return f"<[{number}]>" if by_id else json.dumps(marker, ensure_ascii=False)


def explained(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: the tools in the system message, calls and results as text."""
    turns = [_as_text(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        prompt = _PROMPT.format(tools=listed)
        if turns and turns[0].get("role") in ("system", "developer") and isinstance(turns[0].get("content"), str):
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{prompt}"}
        else:
            turns.insert(0, {"role": "system", "content": prompt})
    return turns


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without calls or results, which are written out."""
    turn = dict(message)
    if turn.get("role") == "tool":
        name = turn.get("name")
        said = f"<tool_response>\n{turn.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": f"{name}: {said}" if name else said}
    calls = turn.pop("tool_calls", None)
    if calls:
        written = [
            "<tool_call>\n"
            + json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
            + "\n</tool_call>"
            for call in (dict(call.get("function", call)) for call in calls)
        ]
        turn["content"] = "\n".join([*([turn["content"]] if turn.get("content") else []), *written])
    return turn
