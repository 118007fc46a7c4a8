"""The text of one answer as it is committed: what may be shown, where it ends, and which characters are relaxed.

This is the text side of the decoding loop's callbacks: `cut` ends a round at a stop string, `exact` keeps positions
strict that would complete one or that lie in the strict prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fly_llm.text.detokenize import Detokenizer
from fly_llm.text.stopping import StopStrings
from fly_llm.types import Span, join_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """Turns committed tokens into released text.

    Args:
        tokenizer: the target's.
        stops: stop strings.
        strict_prefix: the first n tokens are strict.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], strict_prefix: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._strict_prefix = strict_prefix
        self._spans: list[Span] = []  # of every token: the characters it wrote, or helped to write
        self._written = 0  # characters the detokenizer has put out
        self._ready: list[str] = []  # released by the stop strings, not yet taken
        self._released = 0  # characters taken
        self._relaxed: list[int] = []  # relaxed tokens whose characters have not all been taken
        self._held_from = 0  # first token whose characters are still held

    def cut(self, token_ids: Sequence[int]) -> int | None:
        """Take a round's tokens. Returns how many of them to keep if a stop string was completed, else None."""
        for i, token in enumerate(token_ids):
            text = self._detokenizer.push(token)
            self._spans.append((self._written, self._written))
            self._write(text)
            safe, stopped = self._stops.push(text)
            self._ready.append(safe)
            if stopped:
                return i + 1
        return None

    def _write(self, text: str) -> None:
        """Credit new characters to the newest token, and to those before it whose bytes were held for them."""
        if not text:
            return
        start, self._written = self._written, self._written + len(text)
        for i in range(self._held_from, len(self._spans)):
            self._spans[i] = (start, self._written)
        self._held_from = len(self._spans)

    def exact(self, draft_ids: Sequence[int], own_ids: Sequence[int]) -> list[bool]:
        """Which draft positions must be strict: the strict prefix, and where either token would complete a stop."""
        before = len(self._spans)
        strict = [before + i < self._strict_prefix for i in range(len(draft_ids))]
        if self._has_stops:
            for i in range(len(draft_ids)):
                ends = (self._detokenizer.peek([*draft_ids[:i], token]) for token in (draft_ids[i], own_ids[i]))
                strict[i] = strict[i] or any(self._stops.completes(text) for text in ends)
        return strict

    def mark(self, positions: Sequence[int]) -> None:
        """Remember that the tokens at these positions of the answer are relaxed."""
        self._relaxed.extend(positions)

    def take(self) -> tuple[str, tuple[Span, ...]]:
        """The text released since the last call, and where in it relaxed tokens wrote."""
        text = "".join(self._ready)
        self._ready.clear()
        start, self._released = self._released, self._released + len(text)
        spans = join_spans([self.span(i, start) for i in self._relaxed])
        self._relaxed = [i for i in self._relaxed if not self._is_out(i)]
        return text, tuple((a - start, b - start) for a, b in spans)

    def span(self, position: int, after: int = 0) -> Span:
        """The characters a token wrote, as far as they are in the text taken so far, from `after` on."""
        start, end = (min(max(edge, after), self._released) for edge in self._spans[position])
        return start, end

    def _is_out(self, position: int) -> bool:
        start, end = self._spans[position]
        return start < end <= self._released

    def finish(self) -> None:
        """No more tokens will come: release what is held, unless a stop string ended the answer."""
        text = self._detokenizer.flush()
        self._write(text)
        safe, stopped = self._stops.push(text)
        self._ready.append(safe)
        if not stopped:
            self._ready.append(self._stops.flush())
