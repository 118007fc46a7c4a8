"""Several questions at once, asynchronously: answers as they finish, two chains on one input, one that is given up.

One model answers one request at a time, in turn, and never blocks the event loop; so waiting your turn counts against
a timeout. Cancelling stops the model before its next forward, and the next question gets it. Needs nothing but
fly-llm with its `langchain` extra. Runs offline with the bundled model; or give a model's name or folder:
python examples/langchain_fan_out.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel

from langchain_fly import ChatFLy

COUNTRIES = ("France", "Japan", "Egypt")
CAPITAL = ChatPromptTemplate.from_template("What is the capital of {country}?")
LANGUAGE = ChatPromptTemplate.from_template("Which language is spoken in {country}?")
STORY = ChatPromptTemplate.from_template("Tell me a very long story that is set in {country}.")


async def as_they_finish(chain: Runnable) -> dict[str, str]:
    """A question for every country. Answers come in any order, each with the number of its question."""
    answers = {}
    async for number, answer in chain.abatch_as_completed([{"country": country} for country in COUNTRIES]):
        print(f"{COUNTRIES[number]}: {answer}")
        answers[COUNTRIES[number]] = answer
    return answers


async def side_by_side(capital: Runnable, language: Runnable) -> dict[str, str]:
    """One input for two chains."""
    both = await RunnableParallel(capital=capital, language=language).ainvoke({"country": "Greece"})
    print(f"Greece: {both}")
    return both


async def with_a_timeout(capital: Runnable, story: Runnable, timeout: float) -> list[Any]:
    """Three requests, one of which takes longer than anybody wants to wait."""
    results = await asyncio.gather(
        capital.ainvoke({"country": "Germany"}),
        asyncio.wait_for(story.ainvoke({"country": "Peru"}), timeout),
        capital.ainvoke({"country": "Poland"}),
        return_exceptions=True,
    )
    for name, result in zip(("Germany", "story", "Poland"), results, strict=True):
        print(f"{name}: {'given up' if isinstance(result, TimeoutError) else result}")
    return results


async def fan_out(llm: ChatFLy, timeout: float) -> dict[str, Any]:
    capital, language = (prompt | llm | StrOutputParser() for prompt in (CAPITAL, LANGUAGE))
    story = STORY | llm.bind(max_tokens=2000) | StrOutputParser()
    return {
        "as they finish": await as_they_finish(capital),
        "side by side": await side_by_side(capital, language),
        "with a timeout": await with_a_timeout(capital, story, timeout),
    }


def main(model: str | None = None, *, max_tokens: int = 40, timeout: float = 5.0) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = ChatFLy(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens)
    return asyncio.run(fan_out(llm, timeout))


if __name__ == "__main__":
    main(*sys.argv[1:2])
