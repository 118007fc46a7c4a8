"""`FLyLLM`: a local model, sped up by FLy, as a LlamaIndex LLM.

Every endpoint turns its input into one prompt and runs one request; chat and completion differ in nothing else. The
prompt is made, and the request queued, when an endpoint is called, not when its stream is first read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.fly.events import tell_round
from llama_index.llms.fly.messages import to_chat

from fly_llm.config import DEFAULT_MAX_TOKENS
from fly_llm.engine import Prompt
from fly_llm.types import Event, Result
from fly_llm.wrapper import EngineFields

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
        return LLMMetadata(
            context_window=context,
            num_output=self.max_tokens or min(DEFAULT_MAX_TOKENS, context // 4),
            is_chat_model=facts is None or facts.chat_template is not None or self._has_own_messages_to_prompt,
            is_function_calling_model=False,
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
        self, prompt: Prompt, kwargs: Mapping[str, Any], respond: Callable[[str, Event], Response]
    ) -> Generator[Response]:
        """Queue a request now. Returns a generator of its responses."""
        events = self._get_engine().stream(prompt, **self._call(kwargs))

        def responses() -> Generator[Response]:
            with events:
                text = ""
                for event in events:
                    tell_round(event)
                    text += event.text
                    if event.text or event.result is not None:
                        yield respond(text, event)

        return responses()

    def _arun(
        self, prompt: Prompt, kwargs: Mapping[str, Any], respond: Callable[[str, Event], Response]
    ) -> AsyncGenerator[Response]:
        """`_run` for an event loop."""
        events = self._get_engine().astream(prompt, **self._call(kwargs))

        async def responses() -> AsyncGenerator[Response]:
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                text = ""
                async for event in events:
                    tell_round(event)
                    text += event.text
                    if event.text or event.result is not None:
                        yield respond(text, event)

        return responses()

    def _prepare_chat_with_tools(self, tools: Sequence[Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Not there yet: tools would reach the model, but its calls would come back as text."""
        raise NotImplementedError(
            "FLyLLM does not do function calling yet: use an agent that needs none, such as ReActAgent"
        )


def _says(message: ChatMessage, text: str) -> bool:
    """Whether a message is this system prompt already (LlamaIndex's `predict` puts it first itself)."""
    return message.role == MessageRole.SYSTEM and message.content == text


def _chat_response(text: str, event: Event) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=event.text, **_about(event.result))


def _completion_response(text: str, event: Event) -> CompletionResponse:
    return CompletionResponse(text=text, delta=event.text, **_about(event.result))


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
