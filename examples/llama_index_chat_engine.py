"""A chat engine with a memory: three turns, streamed, each of which computes only what is new.

Needs nothing but fly-llm with its `llama-index` extra. Runs offline with the bundled model; or give a model's name or
folder: python examples/llama_index_chat_engine.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.fly import FLyLLM

TURNS = ("List three fruits.", "Now list three vegetables.", "Thank you. Goodbye!")


class Answers(BaseEventHandler):
    """Keeps what each answer says about itself; a chat engine passes on the text alone."""

    raws: list[dict[str, Any]] = []  # noqa: RUF012 - pydantic copies it

    def handle(self, event: Any, **kwargs: Any) -> None:  # noqa: D102 - as in the base class
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.raws.append(event.response.raw)


def main(model: str | None = None, *, max_tokens: int = 40, **settings: Any) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = FLyLLM(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens, **settings)
    memory = ChatMemoryBuffer.from_defaults(token_limit=2000, tokenizer_fn=llm.tokenizer)
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory, system_prompt="You are a friendly assistant.")
    answers = Answers()
    get_dispatcher().add_event_handler(answers)

    texts = []
    for turn in TURNS:
        print(f"> {turn}")
        response = engine.stream_chat(turn)
        pieces = []
        for piece in response.response_gen:
            print(piece, end="", flush=True)
            pieces.append(piece)
        texts.append("".join(pieces))
        usage = answers.raws[-1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"\n  ({cached} of {usage['prompt_tokens']} tokens of the prompt were there already)")
    return {"texts": texts, "raws": answers.raws, "history": engine.chat_history}


if __name__ == "__main__":
    main(*sys.argv[1:2])
