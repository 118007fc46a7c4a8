"""Prompt lookup (Saxena 2023; the "multi-level acceleration" of arXiv 2511.22972): copy what followed last time."""

from __future__ import annotations

from collections.abc import Sequence

from fly_llm.drafters.base import DraftRequest
from fly_llm.types import Draft


class LookupDrafter:
    """Finds the latest earlier occurrence of the last few tokens and proposes what followed it.

    An index from every n-gram to where it last ended grows with the committed tokens, so a proposal costs the same at
    any context length. Longer n-grams are tried first, and the latest match wins. Where the copy runs into the end of
    the text it goes on with what it has just proposed, so a repeating text is proposed to the full length.

    Example: after `5 6 7 8 5 6` the last two tokens were seen before, followed by 7, so `7 8 5 6 7 ...` is proposed.

    Args:
        max_ngram: longest n-gram looked for.
        min_ngram: shortest n-gram that counts as a match.
    """

    num_forwards = 0

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def start(self, request: DraftRequest) -> None:
        """Forget the last request's text."""
        self._ends = {}
        self._indexed = 0

    def propose(self, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        """See `Drafter.propose`. `tentative` is matched but never indexed."""
        self._extend(committed)
        if max_tokens < 1:
            return Draft()
        longest = self._sizes[0]
        tail = (*committed[-longest:], *tentative[-longest:])
        for size in self._sizes:
            if size <= len(tail) and (end := self._ends.get(tail[-size:])) is not None:
                return Draft(self._copy(committed, tentative, end, max_tokens), copied=True)
        return Draft()

    def close(self) -> None:
        """Release the index."""
        self._ends = {}

    def _extend(self, committed: Sequence[int]) -> None:
        """Index the n-grams that have gained a successor: each maps to the position of that successor."""
        for position in range(max(self._indexed, 1), len(committed)):
            window = tuple(committed[max(0, position - self._sizes[0]) : position])
            for size in self._sizes:
                if size <= len(window):
                    self._ends[window[-size:]] = position
        self._indexed = max(self._indexed, len(committed))

    @staticmethod
    def _copy(committed: Sequence[int], tentative: Sequence[int], start: int, count: int) -> tuple[int, ...]:
        """`count` tokens of committed + tentative + the copy itself, from `start` on."""
        copied = list(committed[start : start + count])
        copied.extend(tentative[: count - len(copied)])
        period = len(committed) + len(tentative) - start
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return tuple(copied)
