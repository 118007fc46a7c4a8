"""Runs the checks of one rival, one function per row of the feature table, and prints what happened as a table.

A check returns a verdict and one sentence with the values that were observed. It is "yes" where a user gets what the
check's docstring promises. Otherwise it is "no" where the rival does not offer the feature, and "broken" where it
offers it and something else happens, or where one of the settings that callers everywhere use (temperature, token
limit, stop, seed) is ignored or raises. A check that fails for a reason of its own is an "error", and never stops the
others.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import logging
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

Verdict = tuple[str, str]


class Check(NamedTuple):
    """One line of the table."""

    row: str
    feature: str
    run: Callable[[], Verdict]


CHECKS: list[Check] = []


def row(number: str, feature: str) -> Callable[[Callable[[], Verdict]], Callable[[], Verdict]]:
    """Registers a function as the check of a row; a row with several parts has several, 6a, 6b, ..."""

    def register(function: Callable[[], Verdict]) -> Callable[[], Verdict]:
        CHECKS.append(Check(number, feature, function))
        return function

    return register


def verdict(good: bool, observed: str, otherwise: str = "broken") -> Verdict:
    """The verdict "yes" if `good`, else `otherwise`, with what was observed."""
    return ("yes" if good else otherwise), observed


def quote(value: Any, length: int = 105) -> str:
    """A value on one line, shortened in the middle."""
    text = repr(value)
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def said(error: BaseException, length: int = 110) -> str:
    """An exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:length]}{'...' if len(text) > length else ''}" if text else repr(error)


def attempt(function: Callable[[], Any]) -> Any:
    """What a call returns, or the exception it raises."""
    try:
        return function()
    except Exception as error:
        return error


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """As `attempt`, in a thread that is given up after some seconds: then a `TimeoutError`."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(attempt(function)), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else TimeoutError(f"still waiting after {seconds:g} s")


def warned(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """As `attempt`, and the warnings that transformers logged meanwhile."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("transformers")
    handlers, disabled = logger.handlers, logging.root.manager.disable
    logger.handlers = [Keep(logging.WARNING)]
    logging.disable(logging.NOTSET)
    try:
        return attempt(function), messages
    finally:
        logger.handlers = handlers
        logging.disable(disabled)


def loop_turns(call: Callable[[], Awaitable[Any]]) -> tuple[Any, int, float]:
    """Awaits a call beside a task that wakes every 5 ms: its result or exception, the wake-ups, the seconds."""

    async def run() -> tuple[Any, int, float]:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.005)
                turns += 1

        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0.02)
        before, start = turns, time.perf_counter()
        try:
            result = await call()
        except Exception as error:
            result = error
        seconds, during = time.perf_counter() - start, turns - before
        ticker.cancel()
        return result, during, seconds

    return asyncio.run(run())


def loop_verdict(outcome: tuple[Any, int, float]) -> Verdict:
    """The verdict on an async call: it has to return, and to leave the event loop at least a quarter of its turns."""
    result, turns, seconds = outcome
    if isinstance(result, Exception):
        return "broken", f"raised {said(result)}"
    return verdict(
        turns >= seconds / 0.005 / 4,
        f"took {seconds:.2f} s, in which a task that wakes every 5 ms ran {turns} times",
    )


def work_after_cancel(call: Callable[[], Awaitable[Any]], work_done: Callable[[], int]) -> tuple[str, int, int]:
    """Cancels a call after 0.1 s: what came back, the work done by then, and what was done in the 0.5 s after."""

    async def run() -> tuple[str, int]:
        try:
            await asyncio.wait_for(call(), 0.1)
        except TimeoutError:
            return "cancelled", work_done()
        return "finished, not cancelled", work_done()

    outcome, at_cancel = asyncio.run(run())
    time.sleep(0.5)
    return outcome, at_cancel, work_done() - at_cancel


def traced_model(llm: Any, **kwargs: Any) -> str | None:
    """The model name that a LangChain tracer is told for one call."""
    from langchain_core.callbacks import BaseCallbackHandler

    names: list[str | None] = []

    class Tracer(BaseCallbackHandler):
        def on_chat_model_start(self, *_: Any, metadata: dict[str, Any] | None = None, **__: Any) -> None:
            names.append((metadata or {}).get("ls_model_name"))

    llm.invoke("hi", config={"callbacks": [Tracer()]}, **kwargs)
    return names[0]


def answers_with_cache(*llms: Any) -> list[str]:
    """The answers of LangChain models, asked the same one after the other, with one LangChain cache for all."""
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import set_llm_cache

    set_llm_cache(InMemoryCache())
    try:
        return [llm.invoke("hi").content for llm in llms]
    finally:
        set_llm_cache(None)


def main(rival: str, packages: tuple[str, ...], note: str, *limits: str) -> None:
    """Runs all checks and prints the table.

    Args:
        rival: name of the rival's class, head of the verdict column.
        packages: distributions whose versions are printed.
        note: a sentence that is printed above the table.
        limits: sentences on what was not tried, printed below it.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    threading.excepthook = lambda _: None  # a rival's worker thread that fails is reported by its row
    start = time.perf_counter()
    installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    print(f"{rival}, {datetime.date.today()}: {installed}\n")
    print(f"{note}\n")
    print(f"| row | feature | {rival} | what happened |\n|---|---|---|---|")
    counts: dict[str, int] = {}
    for check in CHECKS:
        try:
            answer, observed = check.run()
        except Exception as error:
            answer, observed = "error", f"the check itself failed: {said(error)}"
        counts[answer] = counts.get(answer, 0) + 1
        cell = observed.replace("|", r"\|").replace("<", r"\<")  # as Markdown
        print(f"| {check.row} | {check.feature} | {answer} | {cell} |", flush=True)
    print()
    for limit in limits:
        print(limit)
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), reverse=True))
    print(f"{summary}; {time.perf_counter() - start:.0f} s")
