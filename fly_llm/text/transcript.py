"""The text of one answer as it is committed: what may be shown, where it ends, and which characters are relaxed.

This is the text side of the decoding loop's callbacks: `cut` ends a round at a stop string, `exact` keeps positions
strict that would complete one, that lie in the strict prefix, or in a zone that is strict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from fly_llm.text.detokenize import Detokenizer
from fly_llm.text.families import HERMES
from fly_llm.text.stopping import StopStrings
from fly_llm.text.zones import Zones
from fly_llm.types import InvalidToolCall, Span, ToolCall, Zone, join_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fly_llm.text.parse import Piece, Reader


class Transcript:
    """Turns committed tokens into released text.

    Args:
        tokenizer: the target's.
        stops: stop strings; looked for in the content, not in reasoning or tool calls.
        strict_prefix: the first n tokens are strict.
        zones: follows the zones of the answer.
        strict_zones: zones that are strict.
        in_grammar: the whole answer is under a grammar.
        reader: parts the answer into content, reasoning and calls; without one, all of it is content.
        keep: special tokens that the reader and the zones need to see.
        end_ids: tokens that end the answer and write nothing, special or not.
        markers: special tokens that write nothing and open or close zones all the same, and their texts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        strict_prefix: int = 0,
        *,
        zones: Zones | None = None,
        strict_zones: Collection[str] = (),
        in_grammar: bool = False,
        reader: Reader | None = None,
        keep: Collection[int] = (),
        end_ids: Collection[int] = frozenset(),
        markers: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, keep)
        self._end_ids = end_ids
        self._markers = markers
        self._reader = reader
        self._zones = zones if zones is not None else Zones(HERMES)
        self._strict_zones = frozenset(strict_zones)
        self._in_grammar = in_grammar
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._strict_prefix = strict_prefix
        self._zone_of: list[Zone] = []  # of every token
        self._spans: list[Span] = []  # of every token: the characters it wrote, or helped to write
        self._unread: deque[tuple[str, range]] = deque()  # characters the reader holds, and the tokens they came from
        self._written = 0  # characters of content so far
        self._ready: list[str] = []  # released by the stop strings, not yet taken
        self._released = 0  # characters taken
        self._relaxed: list[int] = []  # relaxed tokens whose characters have not all been taken
        self._held_from = 0  # first token whose characters are still held
        self._reasoning: list[str] = []
        self._calls: list[ToolCall | InvalidToolCall] = []

    def cut(self, token_ids: Sequence[int]) -> int | None:
        """Take a round's tokens. Returns how many of them to keep if a stop string was completed, else None."""
        for i, token in enumerate(token_ids):
            text = "" if token in self._end_ids else self._detokenizer.push(token)
            self._zone_of.append("grammar" if self._in_grammar else self._zones.push(self._markers.get(token, text)))
            self._spans.append((self._written, self._written))
            if self._take_in(text):
                return i + 1
        return None

    def _take_in(self, text: str) -> bool:
        """Read new text, credit it to its tokens, release what is safe. Returns whether a stop string was found."""
        if not text:
            return False
        tokens = range(self._held_from, len(self._spans))
        self._held_from = len(self._spans)
        if self._reader is None:
            return self._write(text, tokens)
        self._unread.extend((char, tokens) for char in text)
        return self._sort(self._reader.push(text))

    def _sort(self, pieces: Sequence[Piece]) -> bool:
        """Put the parts of an answer where they belong. Returns whether a stop string was found."""
        stopped = False
        for piece in pieces:
            for char in piece.text:
                tokens = self._origin(char)
                if piece.kind == "content":
                    stopped = self._write(char, tokens) or stopped
            if piece.kind == "reasoning":
                self._reasoning.append(piece.text)
            elif piece.call is not None:
                self._calls.append(piece.call)
        return stopped

    def _origin(self, char: str) -> range:
        """The tokens a character came from; characters of markers before it are passed over."""
        while self._unread:
            found, tokens = self._unread.popleft()
            if found == char:
                return tokens
        return range(0)

    def _write(self, text: str, tokens: range) -> bool:
        """Add content, credited to these tokens. Returns whether a stop string was found."""
        start, self._written = self._written, self._written + len(text)
        for i in tokens:
            first, last = self._spans[i]
            self._spans[i] = (start if first == last else first, self._written)
        safe, stopped = self._stops.push(text)
        self._ready.append(safe)
        return stopped

    def exact(self, draft_ids: Sequence[int], own_ids: Sequence[int]) -> list[bool]:
        """Which draft positions must be strict, because of the token itself or of the one it would replace.

        They lie in the strict prefix, in a strict zone (the token that opens one included), or complete a stop string.
        """
        before = len(self._spans)
        strict = [before + i < self._strict_prefix for i in range(len(draft_ids))]
        if self._in_grammar:
            return [True] * len(draft_ids) if "grammar" in self._strict_zones else strict
        if not self._has_stops and not self._strict_zones:
            return strict
        texts: list[str] = []  # of each draft token
        so_far = ""
        for i, (token, own) in enumerate(zip(draft_ids, own_ids, strict=True)):
            ends = [self._detokenizer.peek([*draft_ids[:i], last]) for last in (token, own)]
            if self._has_stops:
                strict[i] = strict[i] or any(self._stops.completes(text) for text in ends)
            new = [text[len(so_far) :] if text.startswith(so_far) else text for text in ends]
            new = [self._markers.get(last, text) for last, text in zip((token, own), new, strict=True)]
            if self._strict_zones:
                found = {self._zones.peek([*texts, text])[-1] for text in new}
                strict[i] = strict[i] or not found.isdisjoint(self._strict_zones)
            texts.append(new[0])
            so_far = ends[0]
        return strict

    def mark(self, positions: Sequence[int]) -> None:
        """Remember that the tokens at these positions of the answer are relaxed."""
        self._relaxed.extend(positions)

    def take(self) -> tuple[str, tuple[Span, ...]]:
        """The content released since the last call, and where in it relaxed tokens wrote."""
        text = "".join(self._ready)
        self._ready.clear()
        start, self._released = self._released, self._released + len(text)
        spans = join_spans([self.span(i, start) for i in self._relaxed])
        self._relaxed = [i for i in self._relaxed if not self._is_out(i)]
        return text, tuple((a - start, b - start) for a, b in spans)

    def take_parts(self) -> tuple[str, list[ToolCall | InvalidToolCall]]:
        """The reasoning and the calls since the last call."""
        reasoning, calls = "".join(self._reasoning), self._calls
        self._reasoning, self._calls = [], []
        return reasoning, calls

    def span(self, position: int, after: int = 0) -> Span:
        """The characters a token wrote, as far as they are in the text taken so far, from `after` on."""
        start, end = (min(max(edge, after), self._released) for edge in self._spans[position])
        return start, end

    def zone(self, position: int) -> Zone:
        """The zone a token is in."""
        return self._zone_of[position]

    def _is_out(self, position: int) -> bool:
        start, end = self._spans[position]
        return start < end <= self._released

    def finish(self) -> None:
        """No more tokens will come: release what is held, unless a stop string ended the answer."""
        stopped = self._stops.matched is not None or self._take_in(self._detokenizer.flush())
        if self._reader is not None and not stopped:
            stopped = self._sort(self._reader.finish())
        if not stopped:
            self._ready.append(self._stops.flush())
