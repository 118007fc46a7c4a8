"""Caches of finished requests, for prompts that begin alike: the next turn of a chat, an agent's next step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fly_llm.models.cached_model import Past

_WORTH_IT = 16
"""Shared tokens below which a cache is not gone on from: computing them is as quick."""


@dataclass
class _Entry:
    kind: Hashable
    ids: tuple[int, ...]
    prompt_length: int
    past: Past
    nbytes: int


class PrefixStore:
    """Caches by the tokens they hold, the least recently used dropped first. Used by one thread at a time."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # the most recently used last
        self._weights: Hashable = None

    @property
    def nbytes(self) -> int:
        """Bytes that all kept caches hold."""
        return sum(entry.nbytes for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, kind: Hashable, ids: Sequence[int]) -> tuple[Past, int] | None:
        """The cache that holds most of the first tokens of `ids`, its last one excepted, which stays pending.

        One whose whole prompt is shared is handed over: it is the same conversation, one turn on or tried again. One
        that shares less (a system prompt) stays for its own next turn, and what is shared of it is copied.

        Returns:
            The cache, and the length to truncate it to; None if no cache helps.
        """
        best, shared = None, _WORTH_IT - 1
        for entry in self._entries:
            if entry.kind == kind:
                common = min(_common(entry.ids, ids), len(ids) - 1)
                if common > shared and common >= entry.past.restorable:
                    best, shared = entry, common
        if best is None:
            return None
        self._entries.remove(best)
        if shared >= best.prompt_length - 1:
            return best.past, shared
        self._entries.append(best)
        return best.past.copy(shared), shared

    def put(self, kind: Hashable, ids: Sequence[int], past: Past, *, prompt_length: int, limit: int) -> None:
        """Keep a cache of `ids`, instead of those it goes on from, and drop the oldest above `limit` bytes.

        Args:
            kind: what it is a cache of; only requests of the same kind get it.
            ids: the tokens it holds: a prompt, or part of one, and what followed.
            past: the cache.
            prompt_length: length of the prompt.
            limit: most bytes to keep in all.
        """
        ids = tuple(ids)
        self._entries = [entry for entry in self._entries if entry.kind != kind or ids[: len(entry.ids)] != entry.ids]
        nbytes = past.nbytes
        if nbytes <= limit:  # one that is too large would take all others with it
            self._entries.append(_Entry(kind, ids, prompt_length, past, nbytes))
        self.trim(limit)

    def trim(self, limit: int) -> None:
        """Drop the least recently used above `limit` bytes."""
        while self._entries and self.nbytes > limit:
            del self._entries[0]

    def check(self, weights: Hashable) -> None:
        """Drop everything if the weights are not those of the caches any more: a live model may have been trained."""
        if weights != self._weights:
            self._entries.clear()
            self._weights = weights


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
