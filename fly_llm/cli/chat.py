"""A conversation on the terminal, or over piped lines."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from rich.text import Text

from fly_llm.cli.output import Printer, clean, error_console, note, output_console, statistics
from fly_llm.config import KNOBS, FLyConfig, SamplingConfig, check_names, resolve
from fly_llm.errors import ConfigError, FLyError
from fly_llm.types import Result

if TYPE_CHECKING:
    from fly_llm.engine import FLyEngine

SHORT_NAMES = {"k": "num_speculative_tokens"}

HELP = """\
/NAME VALUE     change a setting, for example /theta 0.2, /window 4, /lossless on, /k 8 (num_speculative_tokens),
                /temperature 0.7, /stop "\\n\\n", /seed none; /NAME alone shows it
/settings       show every setting
/stats          show the statistics of the last answer
/system TEXT    set the system message; alone shows it, none removes it
/clear          forget the conversation; settings and system message stay
/retry          answer the last question again
/help           show this
/exit           end, as Ctrl-D does
//TEXT          say /TEXT
Ctrl-C stops an answer: what it has so far stays in the conversation, as if it were all of it."""

_TYPES: dict[str, Any] = get_type_hints(FLyConfig) | get_type_hints(SamplingConfig)
_WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


class Chat:
    """Reads lines, answers them, and obeys commands.

    Args:
        engine: answers.
        knobs: the settings to start with, by name.
        system: the system message, if there is one.
        stats: whether to show statistics after each answer.

    Attributes:
        messages: the turns so far, system message left out. A question whose answer failed, or was stopped before its
            first character, is not among them.
        knobs: the settings in force.
    """

    def __init__(
        self, engine: FLyEngine, knobs: Mapping[str, Any], *, system: str | None = None, stats: bool = True
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.knobs = dict(knobs)
        self._engine = engine
        self._system = system
        self._show_stats = stats
        self._question: str | None = None
        self._answered = False  # whether the last question and its answer are the last two messages
        self._last: Result | None = None
        self._done = False
        self._out = output_console()
        self._err = error_console()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: note(self._err, HELP),
            "settings": self._list_settings,
            "stats": self._tell_stats,
            "system": self._set_system,
            "clear": self._clear,
            "retry": self._retry,
            "exit": self._exit,
        }

    def run(self) -> None:
        """Go on until `/exit`, the end of the input, or Ctrl-C twice at the prompt."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() a history and line editing
            note(self._err, "/help lists the commands")
        interrupted = False
        while not self._done:
            try:
                line = clean(self._read()).strip()
            except KeyboardInterrupt:
                self._err.print()
                if interrupted or not sys.stdin.isatty():
                    return
                interrupted = True
                note(self._err, "Ctrl-C again, /exit or Ctrl-D ends the chat")
                continue
            except EOFError:
                if sys.stdin.isatty():
                    self._err.print()
                return
            interrupted = False
            try:
                self.take(line)
            except FLyError as error:
                self._err.print(Text.assemble(("error: ", "bold red"), str(error)))

    def take(self, line: str) -> None:
        """Obey a command or answer a question.

        Raises:
            FLyError: it could not be done; the conversation is as before.
        """
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].partition(" ")
            self._obey(name, argument.strip())
        elif line:
            self._ask(line.removeprefix("/") if line.startswith("//") else line)

    def _read(self) -> str:
        """A line of input. Raises `EOFError` at its end."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input("> ")
        if sys.stdin.isatty():
            self._err.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    def _ask(self, question: str) -> None:
        """Answer a question, and remember both."""
        self._question, self._answered = question, False
        asked = [*self.messages, {"role": "user", "content": question}]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        printer = Printer(self._out)
        stopped = False
        try:
            with self._engine.stream([*system, *asked], **self.knobs) as stream:
                for event in stream:
                    printer.write(event)
                    self._last = event.result
        except KeyboardInterrupt:
            stopped = True
        printer.end()
        if stopped:
            self._last = None
            note(self._err, "stopped")
        if not stopped or printer.text:
            self.messages = [*asked, {"role": "assistant", "content": printer.text}]
            self._answered = True
        if self._last is not None and self._show_stats:
            note(self._err, statistics(self._last))

    def _obey(self, name: str, argument: str) -> None:
        if name in self._commands:
            self._commands[name](argument)
            return
        knob = SHORT_NAMES.get(name, name.replace("-", "_"))
        near = difflib.get_close_matches(name, [*self._commands, *KNOBS], n=1)
        if knob not in KNOBS and near and near[0] in self._commands:
            raise ConfigError(f"unknown command '/{name}': did you mean '/{near[0]}'? /help lists the commands")
        check_names([knob], KNOBS)
        if argument:
            changed = self.knobs | {knob: parse(knob, argument)}
            resolve(FLyConfig(), SamplingConfig(), changed)
            self.knobs = changed
        note(self._err, f"{knob} = {self._shown(knob)}")

    def _shown(self, knob: str) -> str:
        fly, sampling = resolve(FLyConfig(), SamplingConfig(), self.knobs)
        value = getattr(fly, knob) if hasattr(fly, knob) else getattr(sampling, knob)
        if knob == "window":
            return f"{'default' if value is None else value} (in force: {fly.effective_window})"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple | dict):
            return json.dumps(value, ensure_ascii=False) if value else "none"
        return "default" if value is None else str(value)

    def _list_settings(self, _: str) -> None:
        note(self._err, "\n".join(f"{knob:<24}{self._shown(knob)}" for knob in KNOBS))

    def _tell_stats(self, _: str) -> None:
        note(self._err, statistics(self._last) if self._last else "there is no finished answer yet")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text.lower() == "none" else text
        note(self._err, "no system message" if self._system is None else f"system message: {self._system}")

    def _clear(self, _: str) -> None:
        self.messages = []
        self._question = self._last = None
        self._answered = False
        note(self._err, "the conversation is forgotten")

    def _retry(self, _: str) -> None:
        if self._question is None:
            raise ConfigError("there is no question to answer again")
        before, answered = self.messages, self._answered
        if answered:
            self.messages = before[:-2]
        try:
            self._ask(self._question)
        finally:
            if not self._answered:  # it failed, or was stopped before its first character: the old answer stays
                self.messages, self._answered = before, answered

    def _exit(self, _: str) -> None:
        self._done = True


def parse(knob: str, text: str) -> Any:
    """The value of a setting as it is typed, by the type of its field.

    Args:
        knob: a field of `FLyConfig` or `SamplingConfig`.
        text: on/off, a number, a word, or JSON for stop strings and `logit_bias`; "none" where that is a value. A stop
            string may be typed as it is.

    Raises:
        ConfigError: it is not of that type. Ranges are not checked.
    """
    kinds = get_args(_TYPES[knob]) if NoneType in get_args(_TYPES[knob]) else (_TYPES[knob],)
    kind = next(kind for kind in kinds if kind is not NoneType)
    none = text.lower() in ("none", "default")
    if none and NoneType in kinds:
        return None
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ConfigError(f"{knob} must be on or off, got {text!r}")
        return _WORDS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{knob} must be {what}, got {text!r}") from None
    if get_origin(kind) is tuple:
        if none:
            return ()
        value = _json(text) if text[0] in '["' else text
        return tuple(value) if isinstance(value, list) else value
    return _json(text) if get_origin(kind) is Mapping else text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"not JSON: {text!r}") from None
