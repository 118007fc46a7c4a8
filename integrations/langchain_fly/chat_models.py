"""`ChatFLy`: a local model, sped up by FLy, as a LangChain chat model.

Messages are converted (`messages.py`), answered by a `FLyEngine`, and streamed back as chunks of committed text. The
last chunk alone carries usage, finish reason and statistics, because LangChain adds up the numbers of chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from fly_llm.config import DEFAULT_MAX_TOKENS
from fly_llm.types import Event, Round
from fly_llm.wrapper import EngineFields
from langchain_fly.callbacks import FLyChatChunk, atell_rounds, awith_rounds, tell_rounds, with_rounds
from langchain_fly.common import core_errors, ls_params, metadata, usage_metadata
from langchain_fly.messages import to_chat


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

    @property
    def _llm_type(self) -> str:
        return "chat-fly"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes the output; part of LangChain's cache key and of traces."""
        return self._identity()

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
            reasoning_output=False,
            tool_calling=False,
            structured_output=False,
            temperature=True,
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text as it would be in a message, by the target's tokenizer."""
        return self.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the rendered prompt, counted with the real chat template."""
        options = {"tools": tools} if tools else {}
        return self._get_engine().count_tokens(to_chat(messages), **options)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Not there yet: tools would reach the model, but its calls would come back as text."""
        raise NotImplementedError("ChatFLy does not do tool calling yet: use a chain that needs no tools")

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
        """Not there yet: it takes decoding under a grammar."""
        raise NotImplementedError(
            "ChatFLy does not do structured output yet: ask for JSON in the prompt and use a JsonOutputParser"
        )

    def _options(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of one call."""
        return self._call({**kwargs, "stop": stop if stop is not None else kwargs.get("stop")}, ignored=("stream",))

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
            for event, rounds in with_rounds(events):
                yield _chunk(event, rounds)

    async def _achunks(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> AsyncGenerator[FLyChatChunk]:
        """The answer, chunk by chunk, without blocking the event loop."""
        with core_errors():
            events = self._get_engine().astream(to_chat(messages), **self._options(stop, kwargs))
            async with contextlib.aclosing(awith_rounds(events)) as pieces:
                async for event, rounds in pieces:
                    yield _chunk(event, rounds)


def _chunk(event: Event, rounds: tuple[Round, ...]) -> FLyChatChunk:
    """A chunk for an event; the last one carries what is said once: usage, finish reason, model and statistics."""
    message = AIMessageChunk(content=event.text)
    if event.result is not None:
        message = AIMessageChunk(
            content=event.text,
            usage_metadata=usage_metadata(event.result),
            response_metadata=metadata(event.result),
            chunk_position="last",
        )
    chunk = FLyChatChunk(message=message)
    chunk._fly_rounds = rounds
    return chunk
