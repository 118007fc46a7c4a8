"""`FLyLLM`: a local model that completes text, without a chat template, as a LangChain LLM."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import Generation, LLMResult

from fly_llm.config import KNOBS
from fly_llm.types import Event, Round
from fly_llm.wrapper import EngineFields, identified_by
from langchain_fly.callbacks import FLyTextChunk, atell_rounds, awith_rounds, tell_rounds, with_rounds
from langchain_fly.common import core_errors, ls_params, metadata, usage_metadata


class FLyLLM(EngineFields, BaseLLM):
    """A local model that goes on with a text as it stands, sped up by loose speculative decoding (FLy).

    For base models, and for prompt templates that are not chats; `ChatFLy` is for chat models. It takes the same
    settings, in the constructor, per call and bound. `generation_info` of every generation holds usage, finish reason
    and `"fly"`, the settings in force and what FLy did.

    Example:
        >>> llm = FLyLLM(model="Qwen/Qwen2.5-7B", draft_model="Qwen/Qwen2.5-0.5B", max_tokens=50)
        >>> llm.invoke("The capital of France is", lossless=True)
    """

    @property
    def _llm_type(self) -> str:
        return "fly"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes the output; part of LangChain's cache key and of traces."""
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return ls_params(self, "llm", stop, kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the target's tokenizer."""
        return self.encode(text)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """As in LangChain, whose cache forgets that settings of a call change the answer; here it does not."""
        with identified_by(self._given(kwargs)):
            return super().generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """See `generate`."""
        with identified_by(self._given(kwargs)):
            return await super().agenerate(prompts, *args, **kwargs)

    def _given(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The settings among the arguments of a call."""
        given = {name: value for name, value in kwargs.items() if name in (*KNOBS, "max_new_tokens")}
        with core_errors():
            call = self._call(given, chat=False)
        return {name: call[name] for name in (name.replace("max_new_", "max_") for name in given)}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            with contextlib.closing(self._chunks(prompt, stop, kwargs)) as chunks:
                generations.append(_whole(list(tell_rounds(chunks, run_manager))))
        return _result(generations)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            async with contextlib.aclosing(self._achunks(prompt, stop, kwargs)) as chunks:
                generations.append(_whole([chunk async for chunk in atell_rounds(chunks, run_manager)]))
        return _result(generations)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[FLyTextChunk]:
        with contextlib.closing(self._chunks(prompt, stop, kwargs)) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[FLyTextChunk]:
        async with contextlib.aclosing(self._achunks(prompt, stop, kwargs)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _options(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of one call."""
        given = {**kwargs, "stop": stop if stop is not None else kwargs.get("stop")}
        return self._call(given, ignored=("stream",), chat=False)

    def _chunks(self, prompt: str, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Generator[FLyTextChunk]:
        with core_errors(), self._get_engine().stream(prompt, **self._options(stop, kwargs)) as events:
            for event, rounds in with_rounds(events):
                yield _chunk(event, rounds)

    async def _achunks(
        self, prompt: str, stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> AsyncGenerator[FLyTextChunk]:
        with core_errors():
            events = self._get_engine().astream(prompt, **self._options(stop, kwargs))
            async with contextlib.aclosing(awith_rounds(events)) as pieces:
                async for event, rounds in pieces:
                    yield _chunk(event, rounds)


def _chunk(event: Event, rounds: tuple[Round, ...]) -> FLyTextChunk:
    """A chunk for an event; the last one carries what is said once."""
    info = None
    if event.result is not None:
        info = {**metadata(event.result), "usage_metadata": dict(usage_metadata(event.result))}
    chunk = FLyTextChunk(text=event.text, generation_info=info)
    chunk._fly_rounds = rounds
    return chunk


def _whole(chunks: list[FLyTextChunk]) -> Generation:
    return Generation(text="".join(chunk.text for chunk in chunks), generation_info=chunks[-1].generation_info)


def _result(generations: list[Generation]) -> LLMResult:
    """One generation per prompt, and LangChain's sums over them."""
    infos = [generation.generation_info or {} for generation in generations]
    usages = [info["usage_metadata"] for info in infos]
    token_usage = {
        "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
        "completion_tokens": sum(usage["output_tokens"] for usage in usages),
        "total_tokens": sum(usage["total_tokens"] for usage in usages),
    }
    output = {"token_usage": token_usage, "model_name": infos[0]["model_name"]} if infos else None
    return LLMResult(generations=[[generation] for generation in generations], llm_output=output)
