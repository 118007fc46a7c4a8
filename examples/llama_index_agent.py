"""A LlamaIndex agent with two tools: every call, its result and the answer as they come, and what FLy relaxed in each.

Nothing inside a call is ever relaxed: a wrong digit there is a wrong result. Needs fly-llm with its `llama-index` and
`structured` extras. Runs offline with the bundled model; or give a model's name or folder:
python examples/llama_index_agent.py Qwen/Qwen2.5-7B-Instruct
"""

import asyncio  # no annotations from __future__ here: LlamaIndex reads those of the tools as they stand
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, AgentStream, FunctionAgent, ToolCallResult
from llama_index.llms.fly import FLyLLM

TEXT = Path(__file__).parent / "data" / "digital_services_playbook.md"
SYSTEM = "You are a helpful assistant. When a tool has answered, tell the user what it said, in a sentence."
QUESTIONS = {  # and the tool that has the answer
    "How often is the word 'users' in the text?": "count_words",
    "How many days are there from 2024-02-01 to 2024-03-01?": "days_between",
}


def count_words(word: str) -> int:
    """Count how often a word occurs in the text."""
    return re.findall(r"\w+", TEXT.read_text("utf-8").lower()).count(word.lower())


def days_between(start: date, end: date) -> int:
    """Count the days from one date to another."""
    return (date.fromisoformat(str(end)) - date.fromisoformat(str(start))).days


async def ask(llm: FLyLLM, question: str, first: str | None) -> dict[str, Any]:
    """Ask an agent, which calls `first` before anything else, and show what happens."""
    agent = FunctionAgent(
        tools=[count_words, days_between],
        llm=llm,
        system_prompt=SYSTEM,
        initial_tool_choice=first,
        allow_parallel_tool_calls=False,  # a small model, forced to call, would call on and on
    )
    print(f"> {question}")
    run = agent.run(question)
    results, outputs, pieces = [], [], []
    async for event in run.stream_events():
        if isinstance(event, ToolCallResult):
            results.append(event)
            arguments = ", ".join(f"{name}={value!r}" for name, value in event.tool_kwargs.items())
            print(f"  {event.tool_name}({arguments}) = {event.tool_output.content}")
        elif isinstance(event, AgentStream) and event.delta:
            print(event.delta, end="", flush=True)
            pieces.append(event.delta)
        elif isinstance(event, AgentOutput):  # a step is done
            outputs.append(event)
            fly = event.raw["fly"]
            in_calls = fly["relaxed_by_zone"].get("tool", 0)
            print(f"  ({fly['num_relaxed_tokens']} of {fly['num_output_tokens']} tokens relaxed, {in_calls} in calls)")
    return {"results": results, "outputs": outputs, "pieces": pieces, "answer": str(await run)}


def main(model: str | None = None, *, max_tokens: int = 80, **settings: Any) -> dict[str, dict[str, Any]]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = FLyLLM(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens, **settings)

    async def ask_all() -> dict[str, dict[str, Any]]:
        return {question: await ask(llm, question, None if model else tool) for question, tool in QUESTIONS.items()}

    # The bundled model, of 135M parameters, is too small to choose freely. So it is told which tool to call first, and
    # only the arguments are its own. A model that knows how to use tools is left free.
    return asyncio.run(ask_all())


if __name__ == "__main__":
    main(*sys.argv[1:2])
