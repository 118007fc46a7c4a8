"""Watching rounds as they happen: how many tokens were drafted, accepted and relaxed, and how long it took."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    BaseRunManager,
    CallbackManagerForLLMRun,
)
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from pydantic import PrivateAttr

from fly_llm.types import Event, Round


class FLyCallbackHandler(BaseCallbackHandler):
    """A LangChain callback handler that is told about every round of a `ChatFLy` or `FLyLLM`, in order.

    Override `on_fly_round`; give an instance wherever LangChain takes callbacks. It works for `invoke`, `stream` and
    their async twins alike, and changes nothing about the answer.

    Example:
        >>> class Watch(FLyCallbackHandler):
        ...     def on_fly_round(self, fly_round, *, run_id, **kwargs):
        ...         print(fly_round.num_accepted_tokens, "of", fly_round.num_draft_tokens)
        >>> llm.invoke("Why is the sky blue?", config={"callbacks": [Watch()]})
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.iscoroutinefunction(cls.on_fly_round) and not issubclass(cls, AsyncCallbackHandler):
            raise TypeError(f"{cls.__name__}.on_fly_round is async: derive {cls.__name__} from AsyncFLyCallbackHandler")

    def on_fly_round(self, fly_round: Round, *, run_id: UUID, **kwargs: Any) -> Any:
        """A round was committed.

        Args:
            fly_round: its tokens, counts and seconds; see `fly_llm.Round`.
            run_id: the LangChain run it belongs to. Where a completion model is given several prompts at once,
                LangChain names the first one's run for all.
            **kwargs: room for what later versions may add.
        """

    def on_llm_new_token(
        self,
        token: str | list[str | dict[str, Any]],
        *,
        chunk: GenerationChunk | ChatGenerationChunk | None = None,
        run_id: UUID,
        **kwargs: Any,
    ) -> None:
        """Passes on the rounds behind a streamed chunk; call it with `super()` if you override it."""
        for fly_round in getattr(chunk, "_fly_rounds", ()):
            self.on_fly_round(fly_round, run_id=run_id)


class AsyncFLyCallbackHandler(FLyCallbackHandler, AsyncCallbackHandler):
    """`FLyCallbackHandler` for `ainvoke` and `astream`, with an `async def on_fly_round` that is awaited."""

    async def on_fly_round(self, fly_round: Round, *, run_id: UUID, **kwargs: Any) -> Any:
        """See `FLyCallbackHandler.on_fly_round`."""

    async def on_llm_new_token(  # type: ignore[override]
        self,
        token: str | list[str | dict[str, Any]],
        *,
        chunk: GenerationChunk | ChatGenerationChunk | None = None,
        run_id: UUID,
        **kwargs: Any,
    ) -> None:
        """See `FLyCallbackHandler.on_llm_new_token`."""
        for fly_round in getattr(chunk, "_fly_rounds", ()):
            await self.on_fly_round(fly_round, run_id=run_id)


class FLyChatChunk(ChatGenerationChunk):
    """A chunk of a streamed message, which remembers the rounds whose text it carries."""

    _fly_rounds: tuple[Round, ...] = PrivateAttr(default=())  # neither merged nor serialised by LangChain


class FLyTextChunk(GenerationChunk):
    """A chunk of a streamed completion, which remembers the rounds whose text it carries."""

    _fly_rounds: tuple[Round, ...] = PrivateAttr(default=())


Chunk = TypeVar("Chunk", FLyChatChunk, FLyTextChunk)


def with_rounds(events: Iterable[Event]) -> Iterator[tuple[Event, tuple[Round, ...]]]:
    """Events that have something to say, each with the rounds since the last one (a round's text may be held back)."""
    rounds: tuple[Round, ...] = ()
    for event in events:
        rounds = rounds if event.round is None else (*rounds, event.round)
        if event.says_something:
            yield event, rounds
            rounds = ()


async def awith_rounds(events: AsyncIterator[Event]) -> AsyncGenerator[tuple[Event, tuple[Round, ...]]]:
    """`with_rounds` for an asynchronous iterator, which is closed with it."""
    rounds: tuple[Round, ...] = ()
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        async for event in events:
            rounds = rounds if event.round is None else (*rounds, event.round)
            if event.says_something:
                yield event, rounds
                rounds = ()


def tell_rounds(chunks: Iterable[Chunk], run_manager: CallbackManagerForLLMRun | None) -> Iterator[Chunk]:
    """Pass on chunks that nobody streams, telling handlers about their rounds (LangChain would, with the tokens)."""
    handlers = _watching(run_manager)
    for chunk in chunks:
        for fly_round in chunk._fly_rounds:
            if run_manager is None or not handlers:
                break
            handle_event(handlers, "on_fly_round", "ignore_llm", fly_round, run_id=run_manager.run_id)
        yield chunk


async def atell_rounds(
    chunks: AsyncIterator[Chunk], run_manager: AsyncCallbackManagerForLLMRun | None
) -> AsyncIterator[Chunk]:
    """`tell_rounds` without blocking the event loop."""
    handlers = _watching(run_manager)
    async for chunk in chunks:
        for fly_round in chunk._fly_rounds:
            if run_manager is None or not handlers:
                break
            await ahandle_event(handlers, "on_fly_round", "ignore_llm", fly_round, run_id=run_manager.run_id)
        yield chunk


def _watching(run_manager: BaseRunManager | None) -> list[BaseCallbackHandler]:
    handlers = run_manager.handlers if run_manager is not None else []
    return [handler for handler in handlers if isinstance(handler, FLyCallbackHandler)]
