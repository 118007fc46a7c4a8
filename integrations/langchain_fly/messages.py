"""LangChain messages to plain chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from fly_llm.errors import PromptError

_NOT_TEXT_OF_AN_ANSWER = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "thinking", "reasoning")
"""Content blocks of an earlier answer that are not its text; tool calls travel in `tool_calls`."""


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages for the chat template; the caller's messages are not changed.

    Raises:
        PromptError: there are no messages, or a message is of a kind that has no role in a chat.
    """
    if not messages:
        raise PromptError("there are no messages: give at least one, for example HumanMessage('Hello')")
    return [_convert(message) for message in messages]


def _convert(message: BaseMessage) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(message, AIMessage):
        if isinstance(content, list):
            content = [part for part in content if not _is_block(part, _NOT_TEXT_OF_AN_ANSWER)]
        if message.invalid_tool_calls:  # the model should see what it wrote
            content = _with_texts(content, [str(call["args"]) for call in message.invalid_tool_calls if call["args"]])
        converted = {"role": "assistant", "content": content}
        if message.tool_calls:
            converted["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
                for call in message.tool_calls
            ]
        return converted
    if isinstance(message, ToolMessage):
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id, "name": message.name or ""}
    if isinstance(message, HumanMessage):
        return {"role": "user", "content": content}
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": content}
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": content}
    raise PromptError(
        f"a {type(message).__name__} has no role in a chat: use SystemMessage, HumanMessage, AIMessage, ToolMessage or "
        "ChatMessage(role=...)"
    )


def _with_texts(content: Any, texts: list[str]) -> Any:
    """Content with more text behind it."""
    if isinstance(content, list):
        return [*content, *({"type": "text", "text": text} for text in texts)]
    return "\n".join([*([content] if content else []), *texts])


def _is_block(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds
