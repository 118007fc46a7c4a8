"""Where in an answer a token may not be relaxed: tool calls, JSON, and if asked for code and reasoning.

A character state machine over the answer's text, markers included. It is copied to look ahead over a draft, so it keeps
little: the kind of zone it is in, and as many of the last characters as a marker has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fly_llm.text.families import THINK_CLOSE, THINK_OPEN
from fly_llm.types import Zone

if TYPE_CHECKING:
    from fly_llm.text.families import Family

_FENCE = "```"
_WEIGHT: tuple[Zone, ...] = ("text", "reasoning", "code", "json", "tool")


@dataclass(frozen=True, slots=True)
class _State:
    """Where the text has come to.

    Attributes:
        zone: what it is in.
        tail: its last characters, since the last marker.
        depth: open brackets of the JSON value it is in.
        quoted, escaped: inside a JSON string, behind a backslash in it.
        started: the answer has begun: a character that is no space was written outside reasoning.
        fence: the first line of the fence that is being opened; None outside one.
    """

    zone: Zone = "text"
    tail: str = ""
    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    started: bool = False
    fence: str | None = None


class Zones:
    """Follows the zones of one answer.

    A JSON zone is a fence of json, or a value that begins with `{` or `[` as the first character of the answer that is
    no space, until its brackets are balanced; brackets inside its strings do not count. Markers belong to their zones.

    Args:
        family: whose markers open and close tool calls.
        opened: what of the answer the prompt has begun already.
    """

    def __init__(self, family: Family, opened: str = "") -> None:
        self._opens, self._closes = family.call_open, family.call_close
        self._json_body, self._quote = family.json_body, family.quote
        markers = (*family.call_open, *family.call_close, THINK_OPEN, THINK_CLOSE, _FENCE)
        self._longest = max(map(len, markers))
        self._state = self._after(_State(), opened)

    @property
    def zone(self) -> Zone:
        """The zone the text is in now."""
        return self._state.zone

    def push(self, text: str) -> Zone:
        """Takes the text of one token. Returns the zone it belongs to: one that it opens, closes or lies in."""
        zone, self._state = self._of(self._state, text)
        return zone

    def peek(self, texts: Iterable[str]) -> list[Zone]:
        """The zone of each of several tokens, if they followed. Changes nothing.

        A token that begins a marker of a tool call, or goes on with one, counts as part of the call that it may open:
        where a marker is several tokens, relaxing one of them could make a call of what is none.
        """
        state, zones = self._state, []
        for text in texts:
            zone, state = self._of(state, text)
            zones.append("tool" if zone == "text" and self._may_open(state.tail) else zone)
        return zones

    def _may_open(self, tail: str) -> bool:
        """Whether a text ends with the beginning of a call's marker."""
        return any(tail.endswith(marker[:n]) for marker in self._opens for n in range(1, len(marker)))

    def _of(self, state: _State, text: str) -> tuple[Zone, _State]:
        """The zone of a piece, and the state behind it: of several zones it touches, the one that matters most."""
        found: Zone = state.zone
        for char in text:
            state = self._step(state, char)
            found = max(found, state.zone, key=_WEIGHT.index)
        return found, state

    def _after(self, state: _State, text: str) -> _State:
        for char in text:
            state = self._step(state, char)
        return state

    def _step(self, state: _State, char: str) -> _State:
        tail = (state.tail + char)[-self._longest :]
        if state.zone == "json" and state.fence is None:
            if not state.quoted and tail.endswith(self._opens):  # "[TOOL_CALLS]" begins like a list
                return _State("tool", started=True)
            return replace(_in_json(state, char), tail=tail)
        if state.zone == "tool":
            return self._in_tool(state, char, tail)
        if state.zone == "reasoning":
            return _State(started=state.started) if tail.endswith(THINK_CLOSE) else replace(state, tail=tail)
        if state.zone in ("code", "json"):
            return _in_fence(state, char, tail)
        if tail.endswith(self._opens):
            return _State("tool", started=True)
        if tail.endswith(THINK_OPEN):
            return _State("reasoning", started=state.started)
        if tail.endswith(_FENCE):
            return _State("code", fence="", started=True)
        if not state.started and tail.lstrip() in ("{", "["):
            return _State("json", tail=tail, depth=1, started=True)
        return replace(state, tail=tail, started=state.started or not (char.isspace() or _may_be(tail, self._opens)))

    def _in_tool(self, state: _State, char: str, tail: str) -> _State:
        """One more character of a tool call; a marker inside one of its strings is text."""
        if not state.quoted and self._closes and tail.endswith(self._closes):
            return _State(started=True)
        if self._json_body:
            state = _in_string(state, char)
        elif self._quote and tail.endswith(self._quote):
            return replace(state, tail="", quoted=not state.quoted)
        return replace(state, tail=tail)


def _may_be(tail: str, markers: Collection[str]) -> bool:
    """Whether the text so far may still become a marker, and so not be the answer's first word."""
    text = tail.lstrip()
    return any(marker.startswith(text) for marker in (*markers, THINK_OPEN))


def _in_json(state: _State, char: str) -> _State:
    """One more character of a JSON value."""
    if state.escaped:
        return replace(state, escaped=False)
    if state.quoted:
        return replace(state, escaped=char == "\\", quoted=char != '"')
    if char == '"':
        return replace(state, quoted=True)
    depth = state.depth + (char in "{[") - (char in "}]")
    return replace(state, depth=depth) if depth else _State(started=True)


def _in_string(state: _State, char: str) -> _State:
    """One more character of JSON that may be broken: its strings end with their line, as they do in the parser."""
    if state.escaped:
        return replace(state, escaped=False)
    if state.quoted and char == "\\":
        return replace(state, escaped=True)
    return replace(state, quoted=not state.quoted) if char == '"' or (state.quoted and char == "\n") else state


def _in_fence(state: _State, char: str, tail: str) -> _State:
    """One more character of a fenced block, whose first line says what is in it."""
    if state.fence is not None and state.zone == "code" and "\n" not in state.fence:
        fence = state.fence + char
        is_json = char == "\n" and fence.strip().lower() in ("json", "json5", "jsonc")
        return replace(state, zone="json" if is_json else "code", fence=fence, tail="")
    return _State(started=True) if tail.endswith(_FENCE) else replace(state, tail=tail)
