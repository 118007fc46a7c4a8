"""`FLyLLM`: a local model, sped up by FLy, as a LlamaIndex LLM.

Every endpoint turns its input into one prompt and runs one request; chat and completion differ in nothing else. The
prompt and its settings are settled when an endpoint is called; the model works when the answer is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    ContentBlock,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.tools.types import BaseTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.fly.events import tell_round
from llama_index.llms.fly.messages import to_chat
from llama_index.llms.fly.structured import parsed, partly, response_format
from llama_index_instrumentation.span import active_span_id
from pydantic import BaseModel

from fly_llm.config import DEFAULT_MAX_TOKENS
from fly_llm.engine import Prompt
from fly_llm.errors import PromptError
from fly_llm.types import Event, Result
from fly_llm.wrapper import EngineFields

_HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
Model = TypeVar("Model", bound=BaseModel)
Response = TypeVar("Response", ChatResponse, CompletionResponse)


class FLyLLM(EngineFields, CustomLLM, FunctionCallingLLM):
    """A local model, sped up by loose speculative decoding (FLy). `FLyLLM()` alone uses the bundled model.

    FLy is lossy: a token the target would not have chosen may be kept where the target is unsure and the next
    `window` tokens all agree. `response.raw["fly"]` says how many were kept and where; `lossless=True`, here or in one
    call, turns it off. Query engines and agents pass no settings on: use `with_options`, or
    `with fly_llm.overrides(...)`.

    A model with a chat template answers messages, and `complete` asks it one; `complete(..., formatted=True)`, or a
    model without a template, goes on with the text as it stands. `messages_to_prompt` and `completion_to_prompt`, where
    given, take the template's place. `system_prompt` comes first, once, in every endpoint.

    Example:
        >>> llm = FLyLLM(model="Qwen/Qwen2.5-7B-Instruct", draft_model="Qwen/Qwen2.5-0.5B-Instruct")
        >>> llm.complete("Why is the sky blue?", theta=0.15).raw["fly"]["num_relaxed_tokens"]
        >>> Settings.llm, Settings.tokenizer = llm, llm.tokenizer
    """

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised components and traces."""
        return "FLyLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Context window and the like, without loading weights. A model's small files are read once, if need be."""
        return self._metadata(at_hand=False)

    def to_payload(self) -> dict[str, Any]:
        """What traces say about this model; never waits for a file or the hub, since every call asks for it."""
        return {"class_name": self.class_name(), **self._metadata(at_hand=True).model_dump()}

    def _metadata(self, *, at_hand: bool) -> LLMMetadata:
        facts = self._get_engine().facts(at_hand=at_hand)
        context = (facts.context_window if facts is not None else None) or DEFAULT_CONTEXT_WINDOW
        is_chat = facts is None or facts.chat_template is not None
        return LLMMetadata(
            context_window=context,
            num_output=self.max_tokens or min(DEFAULT_MAX_TOKENS, context // 4),
            is_chat_model=is_chat or self._has_own_messages_to_prompt,
            is_function_calling_model=is_chat and not self._has_own_messages_to_prompt and _HAS_GRAMMARS,
            model_name=self._model_name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return _last(self._run(self._chat_prompt(messages), kwargs, _chat_response))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages piece by piece; closing the generator stops the model."""
        return self._run(self._chat_prompt(messages), kwargs, _chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer, or go on with, a text; see the class."""
        return _last(self._run(self._completion_prompt(prompt, formatted), kwargs, _completion_response))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """`complete` piece by piece; closing the generator stops the model."""
        return self._run(self._completion_prompt(prompt, formatted), kwargs, _completion_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` without blocking the event loop; cancelling the task stops the model."""
        await self._alook()
        return await _alast(self._arun(self._chat_prompt(messages), kwargs, _chat_response))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat` without blocking the event loop."""
        await self._alook()
        return self._arun(self._chat_prompt(messages), kwargs, _chat_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` without blocking the event loop; cancelling the task stops the model."""
        await self._alook()
        return await _alast(self._arun(self._completion_prompt(prompt, formatted), kwargs, _completion_response))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`stream_complete` without blocking the event loop."""
        await self._alook()
        return self._arun(self._completion_prompt(prompt, formatted), kwargs, _completion_response)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """As in LlamaIndex, which asks for `metadata` first: a model's files are read beside the event loop."""
        await self._alook()
        return str(await super().apredict(prompt, **prompt_args))

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> Any:
        """See `apredict`."""
        await self._alook()
        return await super().astream(prompt, **prompt_args)

    async def apredict_and_call(self, *args: Any, **kwargs: Any) -> Any:
        """See `apredict`."""
        await self._alook()
        return await super().apredict_and_call(*args, **kwargs)

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of `output_cls`, held to its schema by a grammar.

        Raises:
            ValueError: the answer was cut short.
        """
        if not self._holds_schemas:
            return cast("Model", super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args))
        call = {"response_format": response_format(output_cls), **(llm_kwargs or {})}
        return cast("Model", parsed(output_cls, self.chat(self._get_messages(prompt, **prompt_args), **call)))

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """See `structured_predict`."""
        await self._alook()
        if not self._holds_schemas:
            return cast("Model", await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args))
        call = {"response_format": response_format(output_cls), **(llm_kwargs or {})}
        return cast("Model", parsed(output_cls, await self.achat(self._get_messages(prompt, **prompt_args), **call)))

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """`structured_predict` piece by piece: objects with what is there so far, and at last the whole one."""
        if not self._holds_schemas:
            yield from super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        call = {"response_format": response_format(output_cls), **(llm_kwargs or {})}
        found = response = None
        for response in self.stream_chat(self._get_messages(prompt, **prompt_args), **call):
            if (found := partly(output_cls, response, found)) is not None:
                yield found
        assert response is not None
        yield parsed(output_cls, response)

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """`stream_structured_predict` for an event loop."""
        await self._alook()
        if not self._holds_schemas:
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        call = {"response_format": response_format(output_cls), **(llm_kwargs or {})}
        responses = await self.astream_chat(self._get_messages(prompt, **prompt_args), **call)

        async def objects() -> AsyncGenerator[Any, None]:
            found = response = None
            async for response in responses:
                if (found := partly(output_cls, response, found)) is not None:
                    yield found
            assert response is not None
            yield parsed(output_cls, response)

        return objects()

    @property
    def _holds_schemas(self) -> bool:
        """Structured prediction is done here, unless another way was asked for."""
        return self.metadata.is_function_calling_model and self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    @property
    def _has_own_messages_to_prompt(self) -> bool:
        return self.messages_to_prompt is not generic_messages_to_prompt  # LlamaIndex fills in this one for None

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """What the engine gets for messages."""
        messages = list(messages)
        if self.system_prompt and not (messages and _says(messages[0], self.system_prompt)):
            messages.insert(0, ChatMessage(role=MessageRole.SYSTEM, content=self.system_prompt))
        if self._has_own_messages_to_prompt and self.messages_to_prompt is not None:
            return self.messages_to_prompt(messages)
        return to_chat(messages)

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        """What the engine gets for a text."""
        if not isinstance(prompt, str):  # a ChatMessage would drop it without a word
            raise PromptError(f"a prompt must be a str, got {type(prompt).__name__}: {prompt!r:.80}")
        if formatted:
            return prompt
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return self._extend_prompt(self.completion_to_prompt(prompt))
        facts = self._get_engine().facts()
        if facts is None or facts.chat_template is None:
            return self._extend_prompt(prompt)
        return to_chat(self._extend_messages([ChatMessage(role=MessageRole.USER, content=prompt)]))

    async def _alook(self) -> None:
        """Have the facts about the model at hand, without blocking the event loop."""
        engine = self._get_engine()
        if engine.facts(at_hand=True) is None:
            await asyncio.to_thread(engine.facts)

    def _run(
        self, prompt: Prompt, kwargs: Mapping[str, Any], respond: Callable[[Answer, Event], Response]
    ) -> Generator[Response]:
        """Settle a request now; it is queued when the generator of its responses is first read."""
        engine, span_id = self._get_engine(), active_span_id.get()
        call = self._call(kwargs, chat=not isinstance(prompt, str))

        def responses() -> Generator[Response]:
            with engine.stream(prompt, **call) as events:
                so_far = Answer()
                for event in events:
                    tell_round(event, span_id)
                    if so_far.add(event):
                        yield respond(so_far, event)

        return responses()

    def _arun(
        self, prompt: Prompt, kwargs: Mapping[str, Any], respond: Callable[[Answer, Event], Response]
    ) -> AsyncGenerator[Response]:
        """`_run` for an event loop."""
        engine, span_id = self._get_engine(), active_span_id.get()
        call = self._call(kwargs, chat=not isinstance(prompt, str))

        async def responses() -> AsyncGenerator[Response]:
            async with contextlib.aclosing(engine.astream(prompt, **call)) as events:  # type: ignore[type-var]
                so_far = Answer()
                async for event in events:
                    tell_round(event, span_id)
                    if so_far.add(event):
                        yield respond(so_far, event)

        return responses()

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `chat` is given. A call that is required, or a tool that is chosen, is enforced by a grammar."""
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        if tool_choice is None:
            tool_choice = "required" if tool_required and tools else "auto"
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice if tools else "none",
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Keep the first call only, where one is all that is allowed."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not allow_parallel_tool_calls and len(calls) > 1:
            response.message.blocks = [block for block in response.message.blocks if block not in calls[1:]]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of an answer, or of what has been streamed of it.

        Raises:
            ValueError: there are none, and `error_on_no_tool_call`.
        """
        found = [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=dict(block.tool_kwargs) if isinstance(block.tool_kwargs, dict) else {},
            )
            for block in response.message.blocks
            if isinstance(block, ToolCallBlock)
        ]
        if not found and error_on_no_tool_call:
            raise ValueError(f"the model called no tool, it said {response.message.content!r:.200}")
        return found


def _says(message: ChatMessage, text: str) -> bool:
    """Whether a message is this system prompt already (LlamaIndex's `predict` puts it first itself)."""
    return message.role == MessageRole.SYSTEM and message.content == text


class Answer:
    """What has been streamed of one answer."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ToolCallBlock] = []
        self.invalid: list[str] = []

    def add(self, event: Event) -> bool:
        """Take the next event. Returns whether there is something to say."""
        self.text += event.text
        self.reasoning += event.reasoning
        self.calls.extend(
            ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
            for call in event.tool_calls
        )
        self.invalid.extend(call.raw for call in event.invalid_tool_calls)
        return event.says_something


def _chat_response(so_far: Answer, event: Event) -> ChatResponse:
    blocks: list[ContentBlock] = [ThinkingBlock(content=so_far.reasoning)] if so_far.reasoning else []
    blocks.append(TextBlock(text=so_far.text))
    blocks.extend(so_far.calls)
    more: dict[str, Any] = {"invalid_tool_calls": list(so_far.invalid)} if so_far.invalid else {}
    if so_far.calls:  # where LlamaIndex's streaming programs look for them
        more["tool_calls"] = list(so_far.calls)
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more)
    about = _about(event.result)
    if event.reasoning:
        about["additional_kwargs"] = {**about.get("additional_kwargs", {}), "thinking_delta": event.reasoning}
    return ChatResponse(message=message, delta=event.text, **about)


def _completion_response(so_far: Answer, event: Event) -> CompletionResponse:
    return CompletionResponse(text=so_far.text, delta=event.text, **_about(event.result))


def _about(result: Result | None) -> dict[str, Any]:
    """What the last response says about the answer, JSON-able: LlamaIndex's names for usage, and FLy's report."""
    if result is None:
        return {}
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "total_tokens": result.usage.total_tokens,
    }
    raw = {
        "model": result.settings["model"],
        "finish_reason": result.finish_reason,
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens}},
        "fly": result.report(),
    }
    return {"raw": raw, "additional_kwargs": usage}


def _last(responses: Iterator[Response]) -> Response:
    """The whole answer; the responses before it, and what is new in the last one, are of no interest."""
    for response in responses:
        last = response
    last.delta = None
    return last


async def _alast(responses: AsyncIterator[Response]) -> Response:
    """`_last` for an event loop."""
    async with contextlib.aclosing(responses):  # type: ignore[type-var]
        async for response in responses:
            last = response
    last.delta = None
    return last
