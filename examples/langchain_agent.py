"""An agent with three tools: every call, its result and the answer, as they come, and what FLy relaxed in each.

Nothing inside a call is ever relaxed: a wrong digit there is a wrong result. Needs the `structured` and `examples`
extras (llguidance, langchain). Runs offline with the bundled model; or give a model's name or folder:
python examples/langchain_agent.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, wrap_model_call
from langchain_core.messages import AnyMessage, HumanMessage

from langchain_fly import ChatFLy

TEXT = Path(__file__).parent / "data" / "digital_services_playbook.md"
SYSTEM = "You are a helpful assistant. When a tool has answered, tell the user what it said, in a sentence."
QUESTIONS = (
    "How often is the word 'users' in the text?",
    "What is 23 * 17?",
    "On which day of the week was 1969-07-20?",
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("only numbers, + - * / and brackets are understood")


def calculate(expression: str) -> str:
    """Work out an arithmetic expression."""
    try:
        return str(evaluate(ast.parse(expression, mode="eval").body))
    except (ArithmeticError, SyntaxError, ValueError) as error:
        return f"Error in {expression!r}: {error}"  # which the model reads, and may do better


def count_words(word: str) -> int:
    """Count how often a word occurs in the text."""
    return re.findall(r"\w+", TEXT.read_text("utf-8").lower()).count(word.lower())


def weekday(day: date) -> str:
    """Say which day of the week a date falls on."""
    return f"{day:%A}"


@wrap_model_call
def a_call_then_an_answer(request: Any, handler: Any) -> Any:
    """First a call of any tool, whose arguments fit it; then no more calls."""
    asked = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="any" if asked else "none"))


def show(message: AnyMessage) -> None:
    if message.type == "tool":
        print(f"  result: {message.text}")
        return
    calls = [f"  call: {call['name']} {call['args']}" for call in message.tool_calls]
    print("\n".join(calls or [f"  answer: {message.text}"]))
    if fly := message.response_metadata.get("fly"):  # what the limit on calls says is not from the model
        in_calls = fly["relaxed_by_zone"].get("tool", 0)
        print(f"    {fly['num_relaxed_tokens']} of {fly['num_output_tokens']} tokens relaxed, {in_calls} in calls")


def main(model: str | None = None, *, max_tokens: int = 60, **settings: Any) -> dict[str, list[AnyMessage]]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    # It has no draft model, so all drafts are copies, which are relaxed only if asked for, as here.
    settings = {"dtype": "auto" if model else "float32", "max_tokens": max_tokens, "relax_lookup": True, **settings}
    llm = ChatFLy(model=model, **settings)
    # The bundled model, of 135M parameters, is too small to choose freely: it would call no tool, or one for ever. So
    # when to call is decided for it, and what to call is not. A model that knows how to use tools is left free.
    middleware = [ModelCallLimitMiddleware(run_limit=5), *([] if model else [a_call_then_an_answer])]
    agent = create_agent(llm, [calculate, count_words, weekday], system_prompt=SYSTEM, middleware=middleware)

    said: dict[str, list[AnyMessage]] = {}
    for question in QUESTIONS:
        print(f"> {question}")
        for step in agent.stream({"messages": [HumanMessage(question)]}, stream_mode="updates"):
            for message in (message for update in step.values() for message in (update or {}).get("messages", ())):
                show(message)
                said.setdefault(question, []).append(message)
    return said


if __name__ == "__main__":
    main(*sys.argv[1:2])
