"""Questions about a text, answered by a local model through LangChain; then what FLy gained, and what it changed.

Runs offline with the bundled model. With your own: --model NAME [--draft-model NAME] [--text FILE --question "..."].
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from langchain_fly import ChatFLy

TEXT = Path(__file__).parent / "data" / "digital_services_playbook.md"
QUESTIONS = (
    "What is the product owner responsible for?",
    "How should tests and deployments be automated?",
    "How is the technology stack chosen?",
)
OPEN_ENDED = "Write a paragraph about a lighthouse keeper who meets a whale."
PROMPT = ChatPromptTemplate.from_template(
    "Text:\n{context}\n\nQuestion: {question}\nAnswer with sentences of the text."
)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "strict": {"lossless": True},
    "FLy": {"relax_lookup": True},  # the bundled model has no draft model: only copies can be relaxed
}

Answers = dict[str, AIMessage]
"""The answers to one prompt, by mode."""
NOTE = """\
plain: one token per forward. strict: a drafted token is kept only where the target would have written it; the text \
equals plain for {same} of {count} prompts (all, in float32; in bfloat16 a near-tie can fall the other way).
FLy is lossy: it also keeps some tokens that the target would not have written, so its text may differ in words, \
length and truth.
speed: decode time per token, plain divided by the mode; below 1 is slower than plain. It says nothing about quality.
Without a draft model, drafts are copied from prompt and answer (prompt lookup): where an answer copies little, as in \
the open-ended prompt, there is little to gain. FLy relaxes such copies only if asked to, as here (relax_lookup=True). \
The bundled model is very small: take no figure here for a large one.
"""


def make_retriever(text: str, k: int = 2) -> RunnableLambda[str, list[Document]]:
    """Finds the k passages of a text that fit a question best (BM25)."""
    passages = RecursiveCharacterTextSplitter(chunk_size=700, chunk_overlap=0).create_documents([text])

    def tokenize(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords="en", show_progress=False)

    index = bm25s.BM25()
    index.index(tokenize([passage.page_content for passage in passages]), show_progress=False)

    def retrieve(question: str) -> list[Document]:
        found, _ = index.retrieve(tokenize([question]), k=min(k, len(passages)), show_progress=False)
        return [passages[i] for i in found[0]]

    return RunnableLambda(retrieve)


def join(passages: list[Document]) -> str:
    return "\n\n".join(passage.page_content for passage in passages)


def answer(llm: ChatFLy, text: str, questions: Sequence[str], console: Console) -> list[PromptValue]:
    """Stream the answers, and return the prompts that the model was given."""
    ask = {"context": make_retriever(text) | join, "question": RunnablePassthrough()} | PROMPT
    imagine = ChatPromptTemplate.from_messages([("user", "{request}")])
    requests = [*((question, ask) for question in questions), (OPEN_ENDED, imagine)]
    for number, (question, prompt) in enumerate(requests, 1):
        chain = prompt | llm | StrOutputParser()
        console.print(f"\n{number}. {question}", style="bold", markup=False, highlight=False)
        for piece in chain.stream(question):
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
    return [prompt.invoke(question) for question, prompt in requests]


def measure(llm: ChatFLy, prompts: Sequence[PromptValue], seconds: float = 20.0) -> list[Answers]:
    """Answer every prompt in every mode in turn, again while there is time; the fastest of equal answers is kept."""
    for settings in MODES.values():  # warm up
        llm.invoke(prompts[0], **{**settings, "max_tokens": 8})
    measured: list[Answers] = [{} for _ in prompts]
    started = time.monotonic()
    for _ in range(3):
        for prompt, answers in zip(prompts, measured, strict=True):
            for mode, settings in MODES.items():
                message = llm.invoke(prompt, **settings)
                if mode not in answers or seconds_per_token([message]) < seconds_per_token([answers[mode]]):
                    answers[mode] = message
        if time.monotonic() - started > seconds:
            break
    return measured


def total(messages: Sequence[AIMessage], counter: str) -> Any:
    return sum(message.response_metadata["fly"][counter] for message in messages)


def seconds_per_token(messages: Sequence[AIMessage]) -> float:
    return total(messages, "decode_seconds") / total(messages, "num_output_tokens")


def make_table(measured: Sequence[Answers]) -> Table:
    """One row per prompt and mode, and the totals."""
    table = Table(title="Plain, strict and FLy on the same prompts, in one run")
    for column in ("prompt", "mode", "tokens", "mean acceptance length", "relaxed tokens", "speed"):
        table.add_column(column, justify="left" if column in ("prompt", "mode") else "right")
    for name, group in [*((str(n), [answers]) for n, answers in enumerate(measured, 1)), ("all", list(measured))]:
        plain = seconds_per_token([answers["plain"] for answers in group])
        for mode in MODES:
            messages = [answers[mode] for answers in group]
            tokens, rounds = total(messages, "num_output_tokens"), total(messages, "num_rounds")
            speed = Text(f"{plain / seconds_per_token(messages):.2f}")
            if plain < seconds_per_token(messages):
                speed.stylize("red")
            relaxed = total(messages, "num_relaxed_tokens")
            table.add_row(name, mode, str(tokens), f"{tokens / rounds:.2f}", str(relaxed), speed)
        table.add_section()
    return table


def show_relaxed(message: AIMessage, console: Console) -> None:
    """Print an answer with its relaxed text marked, and what the target would have written instead."""
    fly, text = message.response_metadata["fly"], Text(str(message.content))
    for start, end in fly["relaxed_spans"]:
        text.stylize("underline yellow", start, end)
    console.print(text, soft_wrap=True)
    for change in fly["relaxations"]:
        line = f"   kept {change['text']!r}, the target alone would have gone on with {change['own_text']!r}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name, folder or GGUF file; the bundled model if not given")
    parser.add_argument("--draft-model", help="a small model with the same tokenizer; prompt lookup alone if not given")
    parser.add_argument("--dtype", help='float32 for the bundled model, else "auto", if not given')
    parser.add_argument("--text", type=Path, default=TEXT, help="the text to ask about")
    parser.add_argument("--question", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=100, help="longest answer")
    args = parser.parse_args(argv)
    console = console or Console()

    models = {"draft_model": args.draft_model, "dtype": args.dtype or ("auto" if args.model else "float32")}
    # no caches are kept between answers: each method computes all of its own
    llm = ChatFLy(model=args.model, max_tokens=args.max_tokens, stop=["\n\n"], prefix_cache_bytes=0, **models)
    questions = args.question or QUESTIONS
    prompts = answer(llm, args.text.read_text(encoding="utf-8"), questions, console)

    console.print("\nNow each prompt plain, strict and with FLy in turn ...\n")
    measured = measure(llm, prompts)
    console.print(make_table(measured))
    same = sum(answers["plain"].content == answers["strict"].content for answers in measured)
    console.print(NOTE.format(same=same, count=len(measured)), highlight=False)

    console.print("\nWhat FLy changed", style="bold")
    for number, answers in enumerate(measured, 1):
        relaxed = answers["FLy"].response_metadata["fly"]["num_relaxed_tokens"]
        console.print(f"{number}. relaxed tokens: {relaxed}", highlight=False)
        if relaxed:
            show_relaxed(answers["FLy"], console)


if __name__ == "__main__":
    main()
