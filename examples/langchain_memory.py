"""A conversation that remembers: LangGraph keeps the messages of each thread, ChatFLy answers the last one.

LangGraph's checkpointer is what langchain-core recommends since it deprecated RunnableWithMessageHistory and
InMemoryChatMessageHistory. Needs the `examples` extra (langgraph). Runs offline with the bundled model; or give a
model's name or folder: python examples/langchain_memory.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, trim_messages
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from langchain_fly import ChatFLy

SYSTEM = SystemMessage("You are a helpful assistant.")
TURNS = ("What is the capital of France?", "Which river runs through it?", "Which language do people speak there?")


def make_conversation(llm: ChatFLy, most_tokens: int = 1000) -> CompiledStateGraph:
    """A graph of one step: answer what was said. Its checkpointer adds every message to those of its thread."""
    # What is remembered may grow longer than what the model can read. It gets the newest turns that fit.
    recent = trim_messages(
        max_tokens=most_tokens, token_counter=llm, strategy="last", include_system=True, start_on="human"
    )

    def answer(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": [llm.invoke(recent.invoke([SYSTEM, *state["messages"]]))]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    return graph.compile(checkpointer=InMemorySaver())  # langgraph-checkpoint-sqlite and -postgres keep it for good


def say(conversation: CompiledStateGraph, text: str, thread: str) -> str:
    """Say something in a thread, and print the answer as it is written."""
    print(f"[{thread}] user: {text}\n[{thread}] assistant: ", end="")
    pieces = []
    config = {"configurable": {"thread_id": thread}}
    for piece, _ in conversation.stream({"messages": [HumanMessage(text)]}, config, stream_mode="messages"):
        print(piece.text, end="", flush=True)
        pieces.append(piece.text)
    print()
    return "".join(pieces)


def history(conversation: CompiledStateGraph, thread: str) -> list[BaseMessage]:
    """Everything said in a thread so far."""
    return conversation.get_state({"configurable": {"thread_id": thread}}).values.get("messages", [])


def main(
    model: str | None = None, turns: Sequence[str] = TURNS, *, max_tokens: int = 40, most_tokens: int = 1000
) -> dict[str, list[BaseMessage]]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = ChatFLy(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens)
    conversation = make_conversation(llm, most_tokens)
    for turn in turns:
        say(conversation, turn, "monday")
    say(conversation, turns[1], "tuesday")  # another thread, which knows nothing of the first

    threads = {thread: history(conversation, thread) for thread in ("monday", "tuesday")}
    for thread, messages in threads.items():
        prompts = [message.usage_metadata["input_tokens"] for message in messages if message.type == "ai"]
        print(f"[{thread}] {len(messages)} messages are kept; the model was given {prompts} tokens")
    return threads


if __name__ == "__main__":
    main(*sys.argv[1:2])
