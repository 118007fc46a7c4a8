"""Structured output: what to ask the model for, and what reads its answer, by method and kind of schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.output_parsers.transform import BaseCumulativeTransformOutputParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from fly_llm.errors import ConfigError

METHODS = ("json_schema", "function_calling", "json_mode")


def request_for(schema: Any, method: str) -> tuple[dict[str, Any], Runnable[Any, Any]]:
    """What to bind to the model, and the parser of its message.

    Args:
        schema: a pydantic class (v1 or v2), a TypedDict, a JSON schema; None, for "json_mode" alone, is any object.
        method: one of `METHODS`.

    Raises:
        ConfigError: an unknown method, or no schema where one is needed.
    """
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if schema is None and method != "json_mode":
        raise ConfigError(f"method={method!r} needs a schema")
    pydantic = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    traced = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": None}}
    if schema is not None:
        traced["ls_structured_output_format"]["schema"] = convert_to_json_schema(schema)
    if method == "function_calling":
        tool = convert_to_openai_tool(schema)
        name = tool["function"]["name"]
        calls: Runnable[Any, Any] = (
            _WholePydanticToolsParser(tools=[pydantic], first_tool_only=True)
            if pydantic is not None
            else _WholeKeyToolsParser(key_name=name, first_tool_only=True)
        )
        return {"tools": [tool], "tool_choice": name, **traced}, calls
    parser: Runnable[Any, Any] = (
        _WholePydanticParser(pydantic_object=pydantic) if pydantic is not None else _WholeJsonParser()
    )
    if method == "json_mode":
        return {"response_format": {"type": "json_object"}, **traced}, parser
    return {"response_format": json_schema_format(schema), **traced}, parser


def json_schema_format(schema: Any) -> dict[str, Any]:
    """A schema of any kind as an OpenAI-style `response_format`."""
    fitting = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": str(fitting.get("title", "answer")), "schema": fitting}}


def with_raw(llm: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The parsed answer beside the message it was read from, and the error if it could not be."""
    fine = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | fine.with_fallbacks([failed], exception_key="parsing_error")


class _Whole(BaseCumulativeTransformOutputParser[Any]):
    """Refuses answers that were cut short: LangChain's parsers close their brackets, and take them for whole."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _refuse_cut(getattr(result[0], "message", None))
        return super().parse_result(result, partial=partial)

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        last: list[str | BaseMessage] = []
        watched = (last.append(piece) or piece for piece in input)  # type: ignore[func-returns-value]
        yield from super()._transform(watched)
        _refuse_cut(last[-1] if last else None)

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        last: list[str | BaseMessage] = []
        watched = (last.append(piece) or piece async for piece in input)  # type: ignore[func-returns-value]
        async for parsed in super()._atransform(watched):
            yield parsed
        _refuse_cut(last[-1] if last else None)


def _refuse_cut(message: Any) -> None:
    if isinstance(message, BaseMessage) and message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "the answer was cut short (finish_reason 'length'): give it a larger max_tokens", llm_output=message.text
        )


class _WholeJsonParser(_Whole, JsonOutputParser):
    """JSON that is whole."""


class _WholePydanticParser(_Whole, PydanticOutputParser[Any]):
    """The same, into a pydantic object."""


class _WholeKeyToolsParser(_Whole, JsonOutputKeyToolsParser):
    """The arguments of a call that is whole."""


class _WholePydanticToolsParser(_Whole, PydanticToolsParser):
    """The same, into a pydantic object."""


def openai_format(given: Any) -> Any:
    """A `response_format` in OpenAI's form; a schema by itself becomes one."""
    if given is None or (isinstance(given, Mapping) and "type" in given and given["type"] != "object"):
        return given
    return json_schema_format(given)
