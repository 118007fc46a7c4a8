"""Watching FLy at work from LangChain: every round as it is committed, with what was drafted, accepted and relaxed.

Needs nothing but fly-llm with its `langchain` extra. Runs offline with the bundled model; or give a model's name or
folder: python examples/langchain_rounds.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import sys
from typing import Any
from uuid import UUID

from fly_llm import Round
from langchain_fly import ChatFLy, FLyCallbackHandler

QUESTION = "Repeat this twice: The quick brown fox jumps over the lazy dog, and the dog sleeps in the sun."


class Watch(FLyCallbackHandler):
    """Prints a line for every round, whoever asks the model: a chain, an agent, a stream."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def on_fly_round(self, fly_round: Round, *, run_id: UUID, **kwargs: Any) -> None:  # noqa: D102 - as in the base
        self.rounds.append(fly_round)
        seconds = fly_round.draft_seconds + fly_round.verify_seconds
        kept = "█" * fly_round.num_accepted_tokens + "░" * (fly_round.num_draft_tokens - fly_round.num_accepted_tokens)
        why = f", then rejected: {fly_round.rejection}" if fly_round.rejection else ""
        print(f"{1000 * seconds:6.0f} ms  {kept:15}  {fly_round.num_relaxed_tokens} relaxed{why}")


def main(model: str | None = None, *, max_tokens: int = 48) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = ChatFLy(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens)
    watch = Watch()
    answer = llm.invoke(QUESTION, config={"callbacks": [watch]})
    print(answer.text)
    return {"answer": answer, "rounds": watch.rounds}


if __name__ == "__main__":
    main(*sys.argv[1:2])
