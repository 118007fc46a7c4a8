"""Stop strings, found across the borders of the pieces in which text arrives.

The rule: characters arrive one at a time, and the stop string that is *completed* first ends the text. Of several
completed by the same character, the one that began first wins. So the answer depends on the text alone, never on how it
was cut into pieces: a round that commits twelve tokens stops where twelve rounds of one token would have.
"""

from __future__ import annotations

from collections.abc import Sequence

from fly_llm.errors import ConfigError


class StopStrings:
    """Releases text that cannot belong to a stop string, and says when one is complete.

    Held back is only the longest end of the text that could still grow into a stop string, so a streamed answer is late
    by no more than that. Not thread-safe; one instance serves one answer.

    Args:
        stops: the stop strings, in any order; repeats do no harm. Empty means that nothing ever stops.

    Raises:
        ConfigError: `stops` is one bare string, or holds something that is not a non-empty string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ConfigError(f"stops must be a list of strings, got the one string {stops!r}: pass [{stops!r}]")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ConfigError(f"stop must be non-empty strings, got {stop!r}")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None while none has."""
        return self._matched

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text.

        Args:
            text: the piece; it may be empty.

        Returns:
            The text that is safe to show now, and whether a stop string has been found. Once one has, the text before
            it has been released, and every later call returns `("", True)`.
        """
        if self._matched is not None:
            return "", True
        text = self._held + text
        found = self._first_completed(text)
        if found is not None:
            start, self._matched = found
            self._held = ""
            return text[:start], True
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Releases the held text, because generation ended and no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held

    def completes(self, text: str) -> bool:
        """Whether appending `text` would complete a stop string (true as well once one was found). Changes nothing."""
        return self._matched is not None or self._first_completed(self._held + text) is not None

    def _first_completed(self, text: str) -> tuple[int, str] | None:
        """Start and value of the stop string that wins in `text`, by the module's rule.

        No stop string ends inside the held text, and the held text reaches back to the start of any stop string that is
        still to end, so looking at the held text and what follows it is looking at the whole text.
        """
        found = ((text.find(stop), stop) for stop in self._stops)
        hits = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
