"""LlamaIndex messages to plain chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ThinkingBlock, ToolCallBlock

from fly_llm.errors import PromptError

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def to_chat(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages for the chat template; the caller's messages are not changed.

    Raises:
        PromptError: there are no messages, or one holds something that is not text.
    """
    if not messages:
        raise PromptError("there are no messages: give at least one, for example ChatMessage('Hello')")
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise PromptError(f"messages must be ChatMessage objects, got {type(message).__name__}: {message!r:.80}")
    return [_convert(message) for message in messages]


def _convert(message: ChatMessage) -> dict[str, Any]:
    texts, calls = [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(_call(block))
        elif not isinstance(block, ThinkingBlock):  # thoughts are not part of what was said
            raise PromptError(
                f"the model takes text only, and a message holds a {type(block).__name__}: leave it out, or describe it"
            )
    converted: dict[str, Any] = {"role": _ROLES[message.role], "content": "\n".join(texts)}
    if calls:
        converted["tool_calls"] = calls
    if converted["role"] == "tool":
        kwargs = message.additional_kwargs
        converted |= {"tool_call_id": str(kwargs.get("tool_call_id", "")), "name": str(kwargs.get("name", ""))}
    return converted


def _call(block: ToolCallBlock) -> dict[str, Any]:
    arguments: Any = block.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    return {
        "id": block.tool_call_id or "",
        "type": "function",
        "function": {"name": block.tool_name, "arguments": arguments},
    }
