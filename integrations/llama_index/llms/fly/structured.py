"""Structured prediction: the answer is JSON that a grammar holds to the schema, rather than the arguments of a call."""

from __future__ import annotations

import contextlib
from typing import Any

from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.program.utils import process_streaming_objects
from pydantic import BaseModel


def response_format(output_cls: type[BaseModel]) -> dict[str, Any]:
    """What `chat` is given."""
    return {
        "type": "json_schema",
        "json_schema": {"name": output_cls.__name__, "schema": output_cls.model_json_schema()},
    }


def parsed(output_cls: type[BaseModel], response: ChatResponse) -> Any:
    """The object of a whole answer.

    Raises:
        ValueError: it was cut short; the text is in the message.
    """
    text = response.message.content or ""
    if isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length":
        raise ValueError(
            f"the answer was cut short (finish_reason 'length'): give it a larger max_tokens. It is {text!r}"
        )
    return output_cls.model_validate_json(text)


def partly(output_cls: type[BaseModel], response: ChatResponse, so_far: Any) -> Any:
    """What is there of the object while it is streamed; what was there before, where that cannot be said."""
    with contextlib.suppress(Exception):  # half an answer is often no JSON, however leniently it is read
        return process_streaming_objects(
            response, output_cls, cur_objects=so_far, allow_parallel_tool_calls=False, flexible_mode=True
        )
    return so_far
