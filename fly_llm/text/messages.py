"""Chat messages, checked and brought to one shape: a role, and a text for content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fly_llm.errors import PromptError

Message = dict[str, Any]

SYSTEM = ("system", "developer")
_ROLES = (*SYSTEM, "user", "assistant", "tool")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Checked copies of the messages, with text for contents.

    Raises:
        PromptError: there are none, or one is malformed, has an unknown role or holds something that is not text.
    """
    if isinstance(messages, (str, bytes, Mapping)):
        raise PromptError(f"messages must be a list of messages, got {type(messages).__name__}: put it in a list")
    if not messages:
        raise PromptError("there are no messages: pass at least one, such as {'role': 'user', 'content': 'Hello'}")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise PromptError(f"message {index} must be a mapping with 'role' and 'content', got {message!r:.200}")
        if message["role"] not in _ROLES:
            known = ", ".join(_ROLES)
            raise PromptError(f"message {index} has the unknown role {message['role']!r}: use one of {known}")
        if "content" not in message and not message.get("tool_calls"):
            raise PromptError(f"message {index} has no 'content': give its text, got {message!r:.200}")
        turn = {**message, "content": _text_of(message.get("content"), index)}
        calls = turn.pop("tool_calls", None)
        if calls:  # an empty list would make some templates expect a call
            turn["tool_calls"] = [_with_arguments(call) for call in calls]
        turns.append(turn)
    return turns


def _text_of(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return check_text(content or "", f"message {index}")
    if not isinstance(content, (list, tuple)):
        raise PromptError(f"the content of message {index} must be text or a list of text parts, got {content!r:.200}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type", "untyped") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(
                f"message {index} has a part of type {kind!r} that holds no text, and this is a text-only model: "
                "send text parts"
            )
        texts.append(check_text(text, f"message {index}"))
    return "".join(texts)


def _with_arguments(call: Any) -> Any:
    """The call with its arguments as a dict, where they are the JSON text of one: templates would quote it twice."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else dict(call)


def check_text(text: str, where: str) -> str:
    """The text, if it can be encoded.

    Raises:
        PromptError: it holds half of a surrogate pair, which is no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} holds {text[error.start]!r} at character {error.start}, half of a surrogate pair and no "
            "character: decode its source properly, or replace it with text.encode('utf-8', 'replace').decode()"
        ) from None
    return text
