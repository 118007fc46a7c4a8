"""A conversation that has grown too long for the model: it fails, and a fallback answers from the newest messages.

The fallback counts tokens with the model's own tokenizer and chat template, so what it keeps does fit. Needs nothing
but fly-llm with its `langchain` extra. Runs offline with the bundled model, which reads 8192 tokens; or give a model's
name or folder: python examples/langchain_fallbacks.py HuggingFaceTB/SmolLM2-360M-Instruct
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.runnables import Runnable

from langchain_fly import ChatFLy

TEXT = Path(__file__).parent / "data" / "digital_services_playbook.md"


def long_conversation(times: int = 2) -> list[BaseMessage]:
    """A text, read aloud several times, part by part; then a question about the last part."""
    messages: list[BaseMessage] = [SystemMessage("You are a helpful assistant.")]
    for part in TEXT.read_text(encoding="utf-8").split("\n## ")[1:] * times:
        messages += [HumanMessage(f"Read {part.split(':')[0]} to me."), AIMessage(part)]
    return [*messages, HumanMessage("Summarize this play in one sentence.")]


def too_long(llm: ChatFLy) -> list[BaseMessage]:
    """A conversation that does not fit, whatever the model's context window."""
    times = 1
    while llm.get_num_tokens_from_messages(long_conversation(times)) <= llm.profile["max_input_tokens"]:
        times *= 2
    return long_conversation(times)


def with_trimming(llm: ChatFLy, keep: int) -> Runnable:
    """The model, which is given only the newest turns, up to `keep` tokens, if all of them are too many.

    At most, `keep` is `llm.profile["max_input_tokens"]` less room for an answer; on a CPU, less is faster. It must hold
    the last message, which would be dropped whole.
    """
    newest = trim_messages(max_tokens=keep, token_counter=llm, strategy="last", include_system=True, start_on="human")
    # Only this error is handled. A misspelt setting, say, is not hidden, and would fail with trimmed messages too.
    return llm.with_fallbacks([newest | llm], exceptions_to_handle=(ContextOverflowError,))


def main(
    model: str | None = None, messages: Sequence[BaseMessage] | None = None, *, max_tokens: int = 60, keep: int = 600
) -> tuple[ContextOverflowError | None, AIMessage]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = ChatFLy(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens)
    if messages is None:
        messages = too_long(llm)
    messages = list(messages)
    total = llm.get_num_tokens_from_messages(messages)

    overflow = None
    try:
        llm.invoke(messages)
    except ContextOverflowError as error:  # comes at once, before anything is computed
        print("alone:", overflow := error)

    print("\nwith a fallback: ", end="")
    answer = None
    for piece in with_trimming(llm, keep).stream(messages):
        print(piece.text, end="", flush=True)
        answer = piece if answer is None else answer + piece
    print(f"\n\nanswered from {answer.usage_metadata['input_tokens']} of {total} tokens")
    return overflow, answer


if __name__ == "__main__":
    main(*sys.argv[1:2])
