"""Watching rounds as they happen: how many tokens were drafted, accepted and relaxed, and how long it took."""

from __future__ import annotations

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent

from fly_llm.types import Event

_dispatcher = get_dispatcher(__name__)


class FLyRoundEvent(BaseEvent):
    """One round of an `FLyLLM` was committed; sent to LlamaIndex's event handlers, in order.

    Example:
        >>> class Watch(BaseEventHandler):
        ...     def handle(self, event, **kwargs):
        ...         if isinstance(event, FLyRoundEvent):
        ...             print(event.num_accepted_tokens, "of", event.num_draft_tokens)
        >>> get_dispatcher().add_event_handler(Watch())

    Attributes:
        token_ids: the tokens the round emitted.
        relaxed: positions in `token_ids` of relaxed tokens.
        num_draft_tokens: how many tokens were proposed.
        num_accepted_tokens: how many of them were kept, relaxed ones included.
        num_relaxed_tokens: kept tokens the target would not have chosen.
        rejection: why the first rejected token was rejected; see `fly_llm.Round`.
        draft_seconds: time in the drafter.
        verify_seconds: time in the target's forward, judging included.
    """

    token_ids: list[int]
    relaxed: list[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_relaxed_tokens: int
    rejection: str | None
    draft_seconds: float
    verify_seconds: float

    @classmethod
    def class_name(cls) -> str:
        """Name in traces."""
        return "FLyRoundEvent"


def tell_round(event: Event, span_id: str | None) -> None:
    """Send the round behind an engine event, if there is one, as part of the span in which it was asked for."""
    if event.round is not None:
        round_ = event.round
        _dispatcher.event(
            FLyRoundEvent(
                span_id=span_id,
                token_ids=list(round_.token_ids),
                relaxed=list(round_.relaxed),
                num_draft_tokens=round_.num_draft_tokens,
                num_accepted_tokens=round_.num_accepted_tokens,
                num_relaxed_tokens=round_.num_relaxed_tokens,
                rejection=round_.rejection,
                draft_seconds=round_.draft_seconds,
                verify_seconds=round_.verify_seconds,
            )
        )
