"""A toy `ScoringModel`: a table of logits. Fast enough for statistics, exact enough for tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fly_llm.types import Draft

Table = Callable[[tuple[int, ...]], Tensor]


def markov_table(vocab_size: int, *, sharpness: float = 2.0, seed: int = 0, tilt: float = 0.0) -> Table:
    """Random logits for every pair of last tokens; `tilt` mixes in other random logits (a draft of this target)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * sharpness
    other = torch.randn(vocab_size, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed + 999))
    logits = logits + tilt * other * sharpness

    def table(prefix: tuple[int, ...]) -> Tensor:
        before, last = prefix[-2] if len(prefix) > 1 else 0, prefix[-1]
        return logits[before, last]

    return table


def script_table(vocab_size: int, script: Sequence[int], *, uncertain: Sequence[int] = ()) -> Table:
    """Logits whose argmax after i tokens is script[i]: nearly certain, or flat at the `uncertain` positions."""

    def table(prefix: tuple[int, ...]) -> Tensor:
        position = len(prefix)
        logits = torch.zeros(vocab_size)
        if position < len(script):
            logits[script[position]] = 1.0 if position in uncertain else 30.0
        return logits

    return table


class ToyModel:
    """Scores by table; remembers which tokens it holds, so tests can check the cache against the committed text."""

    def __init__(self, table: Table, vocab_size: int, max_length: int | None = None) -> None:
        self._table = table
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.on_forward: Callable[[], None] = lambda: None
        self.reset()

    resumes = True

    def reset(self) -> None:
        self.ids: list[int] = []
        self.num_forwards = 0
        self.switch = None

    @property
    def length(self) -> int:
        return len(self.ids)

    def advance(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        assert 1 <= num_logits <= len(tokens)
        self.on_forward()
        self.num_forwards += 1
        self.ids.extend(tokens)
        ends = range(len(self.ids) - num_logits + 1, len(self.ids) + 1)
        return torch.stack([self._table(tuple(self.ids[:end])) for end in ends])

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]

    def settle(self) -> None: ...

    def check_rollback(self) -> None: ...


class ScriptDrafter:
    """Proposes what it is told to, round after round."""

    num_forwards = 0

    def __init__(self, proposals: Sequence[Sequence[int]]) -> None:
        self._proposals = itertools.chain(proposals, itertools.repeat(()))

    def propose(self, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        return Draft(tuple(next(self._proposals))[:max_tokens])
