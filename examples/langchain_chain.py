"""A chain, prompt | ChatFLy | parser: invoked, streamed and batched, with FLy's settings changed from call to call.

Needs nothing but fly-llm with its `langchain` extra. Runs offline with the bundled model; or give a model's name or
folder: python examples/langchain_chain.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField

from langchain_fly import ChatFLy

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You are a careful editor. Answer with the corrected text alone."),
        ("user", "Rewrite this text with correct grammar:\n\n{text}"),
    ]
)
TEXT = {"text": "Bees lives in hives. Every hive have one queen, and the queen lay all the eggs of the hive."}
MORE = [{"text": "They was happy to sees us."}, {"text": "A spider have eight legs, and it are not an insect."}]


def show(how: str, message: AIMessage) -> None:
    """Print an answer, and what FLy did for it."""
    fly = message.response_metadata["fly"]
    mode = "lossless" if fly["lossless"] else f"theta {fly['theta']}, window {fly['window']}"
    print(f"{how} ({mode}): {message.text}")
    print(f"  {fly['num_relaxed_tokens']} of {fly['num_output_tokens']} tokens relaxed,", end=" ")
    print(f"{fly['mean_acceptance_length']:.1f} tokens per target forward")


def main(model: str | None = None, *, max_tokens: int = 40) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    # It has no draft model, so all drafts are copies, which are relaxed only if asked for, as here.
    llm = ChatFLy(
        model=model, dtype="auto" if model else "float32", max_tokens=max_tokens, stop=["\n\n"], relax_lookup=True
    )
    chain = PROMPT | llm | StrOutputParser()

    print("invoke:", invoked := chain.invoke(TEXT))
    print("stream:", end=" ")
    pieces = []
    for piece in chain.stream(TEXT):  # what has been streamed is never taken back
        print(piece, end="", flush=True)
        pieces.append(piece)
    print("\nbatch:", batched := chain.batch(MORE), end="\n\n")  # one after the other, on one model

    # The parser keeps the text alone; the message itself says what FLy did. Correcting is a hard case for FLy: a
    # mistake is drafted by copying it from the prompt, and a relaxed copy is a mistake that stays in.
    answers = {"as it is": (PROMPT | llm).invoke(TEXT)}

    # Settings are bound to a model in a chain ...
    answers["bind lossless"] = (PROMPT | llm.bind(lossless=True)).invoke(TEXT)
    answers["bind"] = (PROMPT | llm.bind(theta=0.0, window=2)).invoke(TEXT)

    # ... or chosen by whoever uses the finished chain.
    settings = {name: ConfigurableField(id=name) for name in ("theta", "lossless")}
    careful = (PROMPT | llm.configurable_fields(**settings)).with_config(configurable={"theta": 0.9})
    answers["with_config"] = careful.invoke(TEXT)
    answers["for one call"] = careful.invoke(TEXT, {"configurable": {"lossless": True}})

    for how, answer in answers.items():
        show(how, answer)
    return {"invoke": invoked, "stream": pieces, "batch": batched, "answers": answers}


if __name__ == "__main__":
    main(*sys.argv[1:2])
