"""`ChatFLy`: a local model, sped up by FLy, as a LangChain chat model.

Messages are converted (`messages.py`), answered by a `FLyEngine`, and streamed back as chunks of committed text. The
last chunk alone carries usage, finish reason and statistics, because LangChain adds up the numbers of chunks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from fly_llm.config import DEFAULT_MAX_TOKENS
from fly_llm.types import Event, Round
from fly_llm.wrapper import LOADING, EngineFields
from langchain_fly.callbacks import FLyChatChunk, atell_rounds, awith_rounds, tell_rounds, with_rounds
from langchain_fly.common import core_errors, ls_params, metadata, usage_metadata
from langchain_fly.messages import to_chat
from langchain_fly.structured import openai_format, request_for, with_raw

_PROFILE_KEYS = frozenset(
    [
        "name",
        "open_weights",
        "max_input_tokens",
        "max_output_tokens",
        "text_inputs",
        "text_outputs",
        "image_inputs",
        "image_outputs",
        "audio_inputs",
        "audio_outputs",
        "video_inputs",
        "video_outputs",
        "reasoning_output",
        "tool_calling",
        "tool_choice",
        "structured_output",
        "temperature",
    ]
)
"""Of a profile that was made here; one that a user gave is left alone."""
_HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None


class ChatFLy(EngineFields, BaseChatModel):
    """A local chat model, sped up by loose speculative decoding (FLy). `ChatFLy()` alone uses the bundled model.

    FLy is lossy: a token the target would not have chosen may be kept where the target is unsure and the next
    `window` tokens all agree. `response_metadata["fly"]` of every answer says how many were kept and where;
    `lossless=True`, here or in one call, turns it off.

    Every field below that is a setting of FLy or of sampling can also be given per call, `llm.invoke(x, theta=0.2)`, or
    bound, `llm.bind(theta=0.2)`. Weights are loaded by the first call and shared by all instances of the same models.

    Example:
        >>> llm = ChatFLy(model="Qwen/Qwen2.5-7B-Instruct", draft_model="Qwen/Qwen2.5-0.5B-Instruct")
        >>> answer = llm.invoke("Why is the sky blue?", theta=0.15, window=4)
        >>> answer.response_metadata["fly"]["num_relaxed_tokens"]
    """

    streaming: bool = False
    """Stream inside `invoke` as well, so that callbacks see tokens."""

    def _settle(self) -> None:
        super()._settle()
        if self.profile is not None and self.profile.keys() == _PROFILE_KEYS:  # made here, perhaps for another model
            self.profile = self._resolve_model_profile()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        changes = name in ("model", "max_tokens", *LOADING) and self.profile is not None
        if changes and self.profile is not None and self.profile.keys() == _PROFILE_KEYS:
            super().__setattr__("profile", self._resolve_model_profile())

    def __repr_args__(self) -> Any:
        """Without the profile, which hides what was set."""
        return [(name, value) for name, value in super().__repr_args__() if name != "profile"]

    @property
    def _llm_type(self) -> str:
        return "chat-fly"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes the output; part of LangChain's cache key and of traces."""
        return {**self._identity(), "output_version": self.output_version}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return ls_params(self, "chat", stop, kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        """From the model's small files, if they are on this machine; weights are not loaded, the hub is not asked."""
        facts = self._get_engine().facts(at_hand=True)
        if facts is None or facts.context_window is None:
            return None
        return ModelProfile(
            name=self._model_name,
            open_weights=True,
            max_input_tokens=facts.context_window,
            max_output_tokens=min(facts.context_window, self.max_tokens or DEFAULT_MAX_TOKENS),
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            image_outputs=False,
            audio_inputs=False,
            audio_outputs=False,
            video_inputs=False,
            video_outputs=False,
            reasoning_output="</think>" in (facts.chat_template or ""),
            tool_calling=facts.chat_template is not None,
            tool_choice=facts.chat_template is not None and _HAS_GRAMMARS,
            structured_output=_HAS_GRAMMARS,
            temperature=True,
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text as it would be in a message, by the target's tokenizer."""
        return self.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the rendered prompt, counted with the real chat template."""
        if not messages:  # `trim_messages` asks
            return 0
        options = {"tools": [convert_to_openai_tool(tool) for tool in tools]} if tools else {}
        with core_errors():
            return self._get_engine().count_tokens(to_chat(messages), **options)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Give the model tools. Nothing inside a call is ever relaxed.

        Args:
            tools: functions, classes, LangChain tools, or dicts in OpenAI's form.
            tool_choice: "auto" (the default), "none", "any" or "required", a tool's name, a bool, or a dict that names
                a tool. A forced call is enforced by a grammar, arguments included.
            strict: taken and not needed: forced calls follow their schema in any case.
            parallel_tool_calls: whether a forced answer may hold several calls.
            **kwargs: other settings to bind.
        """
        choice = {"tool_choice": tool_choice} if tool_choice is not None else {}
        parallel = {"parallel_tool_calls": parallel_tool_calls} if parallel_tool_calls is not None else {}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **choice, **parallel, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that fit a schema, enforced by a grammar, and parsed.

        Args:
            schema: a pydantic class (v1 or v2), a TypedDict or a JSON schema.
            method: "json_schema" (the answer is the JSON), "function_calling" (it is the arguments of a forced call) or
                "json_mode" (it is any JSON object; say in the prompt which).
            include_raw: return a dict with "raw" (the message), "parsed" and "parsing_error".
            strict: taken and not needed. It has nothing to do with strict verification.
            tools: tools the model may call instead of answering, with "json_schema" and "json_mode".
            **kwargs: other settings to bind.
        """
        bound, parser = request_for(schema, method)
        if tools:
            bound["tools"] = [*bound.get("tools", ()), *(convert_to_openai_tool(tool) for tool in tools)]
        llm = self.bind(**bound, **kwargs)
        return with_raw(llm, parser) if include_raw else llm | parser

    def _options(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of one call."""
        given = {**kwargs, "stop": stop if stop is not None else kwargs.get("stop")}
        if given.get("tools"):
            given["tools"] = [convert_to_openai_tool(tool) for tool in given["tools"]]
        if given.get("response_format") is not None:
            given["response_format"] = openai_format(given["response_format"])
        structured = given.get("tools") or given.get("response_format")  # whose schemas are always followed strictly
        return self._call(given, ignored=("stream", "strict") if structured else ("stream",))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with contextlib.closing(self._chunks(messages, stop, kwargs)) as chunks:
            return generate_from_stream(tell_rounds(chunks, run_manager))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with contextlib.aclosing(self._achunks(messages, stop, kwargs)) as chunks:
            return await agenerate_from_stream(atell_rounds(chunks, run_manager))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with contextlib.closing(self._chunks(messages, stop, kwargs)) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with contextlib.aclosing(self._achunks(messages, stop, kwargs)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _chunks(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> Generator[FLyChatChunk]:
        """The answer, chunk by chunk."""
        with core_errors(), self._get_engine().stream(to_chat(messages), **self._options(stop, kwargs)) as events:
            calls = itertools.count()
            for event, rounds in with_rounds(events):
                yield _chunk(event, rounds, calls)

    async def _achunks(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> AsyncGenerator[FLyChatChunk]:
        """The answer, chunk by chunk, without blocking the event loop."""
        with core_errors():
            events = self._get_engine().astream(to_chat(messages), **self._options(stop, kwargs))
            calls = itertools.count()
            async with contextlib.aclosing(awith_rounds(events)) as pieces:
                async for event, rounds in pieces:
                    yield _chunk(event, rounds, calls)


def _chunk(event: Event, rounds: tuple[Round, ...], calls: Iterator[int]) -> FLyChatChunk:
    """A chunk for an event; the last one carries what is said once: usage, finish reason, model and statistics.

    LangChain repairs the arguments of a streamed call that is cut short, and takes them for whole. So calls come whole,
    and what is no call has its raw text for arguments, which begins with a marker and cannot be repaired.
    """
    last: dict[str, Any] = {}
    if event.result is not None:
        last = {
            "usage_metadata": usage_metadata(event.result),
            "response_metadata": metadata(event.result),
            "chunk_position": "last",
        }
    whole = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in event.tool_calls]
    broken = [(None, call.raw, call.id) for call in event.invalid_tool_calls]
    message = AIMessageChunk(
        content=event.text,
        additional_kwargs={"reasoning_content": event.reasoning} if event.reasoning else {},
        tool_call_chunks=[
            tool_call_chunk(name=name, args=args, id=id_, index=next(calls)) for name, args, id_ in (*whole, *broken)
        ],
        **last,
    )
    chunk = FLyChatChunk(message=message)
    chunk._fly_rounds = rounds
    return chunk
