"""What a command writes: answers to stdout, statistics, notes and errors to stderr; and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from fly_llm.errors import ConfigError, FLyError
from fly_llm.types import Event, Result

LOG_VARIABLE = "FLY_LLM_LOG"
RELAXED_STYLE = Style.parse("yellow underline")

_INTERRUPTED = 130
_BROKEN_PIPE = 141
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
"""Control characters -> a picture of each, so that a model's text cannot steer the terminal. One to one: spans hold."""


@contextlib.contextmanager
def reporting(*, verbose: bool = False) -> Iterator[None]:
    """Run a command: set up streams and log, and turn whatever ends it into a message and an exit code.

    The codes: 1 after an `FLyError`, 130 after Ctrl-C, 141 if whoever read the output has gone away.
    """
    _prepare_streams()
    try:
        with _logging(verbose):
            yield
            sys.stdout.flush()
    except FLyError as error:
        error_console().print(Text.assemble(("error: ", "bold red"), str(error)))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        error_console().print()
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is left in the buffer must not fail at exit again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from None


def output_console() -> Console:
    """Standard output."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def error_console() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Write something that is no answer, dimly."""
    console.print(Text(text, style="dim"))


class Printer:
    """Writes one answer as it is committed: relaxed text marked on a terminal, nothing but the text anywhere else.

    Args:
        console: where to; whether it is a terminal decides (`FORCE_COLOR` makes anything one).

    Attributes:
        text: what has been written so far.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.text = ""

    def write(self, event: Event) -> None:
        """Write what an event brings."""
        self.text += event.text
        if not event.text:
            return
        if not self._console.is_terminal:
            self._console.file.write(event.text)
            self._console.file.flush()
            return
        self._console.print(Segments(_marked(event)), end="", soft_wrap=True)

    def end(self) -> None:
        """Write the newline after the answer."""
        self._console.file.write("\n")
        self._console.file.flush()


def _marked(event: Event) -> list[Segment]:
    """The text of an event in pieces, relaxed ones styled, and control characters made visible."""
    text, at, pieces = event.text.translate(_VISIBLE), 0, []
    for start, end in event.relaxed_spans:
        pieces += [Segment(text[at:start]), Segment(text[start:end], RELAXED_STYLE)]
        at = end
    return [piece for piece in (*pieces, Segment(text[at:])) if piece.text]


def statistics(result: Result) -> str:
    """One line about an answer."""
    stats = result.stats
    return " | ".join(
        (
            f"{stats.num_output_tokens} tokens",
            f"{stats.tokens_per_second:.1f} tokens/s",
            f"mean acceptance length {stats.mean_acceptance_length:.2f}",
            f"{stats.num_relaxed_tokens} relaxed",
            f"prefill {stats.prefill_seconds:.2f} s",
            f"finish reason: {result.finish_reason}",
        )
    )


def document(result: Result) -> dict[str, Any]:
    """Everything about an answer, JSON-able: the fields of `Result`, with the derived values among the counts."""
    usage = result.usage
    return dataclasses.asdict(result) | {
        "usage": dataclasses.asdict(usage) | {"total_tokens": usage.total_tokens},
        "stats": result.stats.as_dict(),
        "relaxed_spans": result.relaxed_spans,
    }


def print_json(value: Any) -> None:
    """Write one JSON document on one line; ASCII, so that it survives any encoding."""
    sys.stdout.write(json.dumps(value) + "\n")


def clean(text: str) -> str:
    """Text as it came from the shell, with bytes that are not text replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _prepare_streams() -> None:
    """No character may crash a stream, and a newline is one byte in a file."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(newline="\n")


@contextlib.contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Show the package's log on stderr.

    Raises:
        ConfigError: `FLY_LLM_LOG` is no level.
    """
    name = "DEBUG" if verbose else (os.environ.get(LOG_VARIABLE) or "WARNING").upper()
    level = logging.getLevelNamesMapping().get(name)
    if level is None:
        raise ConfigError(f"{LOG_VARIABLE} must be debug, info, warning or error, got {os.environ[LOG_VARIABLE]!r}")
    logger = logging.getLogger("fly_llm")
    before, handler = logger.level, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
