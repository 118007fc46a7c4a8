"""Watching FLy at work from LlamaIndex: every round as it is committed, as an instrumentation event.

Needs nothing but fly-llm with its `llama-index` extra. Runs offline with the bundled model; or give a model's name or
folder: python examples/llama_index_rounds.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.llms.fly import FLyLLM, FLyRoundEvent

QUESTION = "Repeat this twice: The quick brown fox jumps over the lazy dog, and the dog sleeps in the sun."


class Watch(BaseEventHandler):
    """Prints a line for every round, whoever asks the model: a query engine, an agent, a stream."""

    rounds: list[FLyRoundEvent] = []  # noqa: RUF012 - pydantic copies it

    def handle(self, event: Any, **kwargs: Any) -> None:  # noqa: D102 - as in the base class
        if isinstance(event, FLyRoundEvent):
            self.rounds.append(event)
            seconds = event.draft_seconds + event.verify_seconds
            kept = "█" * event.num_accepted_tokens + "░" * (event.num_draft_tokens - event.num_accepted_tokens)
            why = f", then rejected: {event.rejection}" if event.rejection else ""
            print(f"{1000 * seconds:6.0f} ms  {kept:15}  {event.num_relaxed_tokens} relaxed{why}")


def main(model: str | None = None, *, max_tokens: int = 48) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = FLyLLM(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens)
    watch = Watch()
    get_dispatcher().add_event_handler(watch)
    answer = llm.complete(QUESTION)
    print(answer.text)
    return {"answer": answer, "rounds": watch.rounds}


if __name__ == "__main__":
    main(*sys.argv[1:2])
