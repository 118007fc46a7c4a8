"""Drafting inside a grammar: forced tokens cost nothing, and no draft goes where the grammar does not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fly_llm.drafters.base import Drafter, DraftRequest
from fly_llm.types import Draft


class Guide(Protocol):
    """The part of a grammar's state that drafting needs; see `fly_llm.text.constrain.Constraint`."""

    def forced(self, tentative: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens that must follow."""

    def allowed(self, tentative: Sequence[int], draft_ids: Sequence[int]) -> int:
        """How many first tokens of a draft are allowed."""


class GuidedDrafter:
    """Proposes what the grammar forces, then what another drafter proposes, as far as the grammar allows it.

    Args:
        inner: drafts where there is a choice.
        guide: the grammar's state.
    """

    def __init__(self, inner: Drafter, guide: Guide) -> None:
        self._inner = inner
        self._guide = guide
        self._eos_ids: Collection[int] = ()

    @property
    def num_forwards(self) -> int:
        """Draft model forwards in this request so far."""
        return self._inner.num_forwards

    def start(self, request: DraftRequest) -> None:
        """See `Drafter.start`."""
        self._eos_ids = request.eos_ids
        self._inner.start(request)

    def close(self) -> None:
        """See `Drafter.close`."""
        self._inner.close()

    def propose(self, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        """See `Drafter.propose`."""
        forced = self._guide.forced(tentative, max_tokens)
        draft = Draft()
        if len(forced) < max_tokens and not (forced and forced[-1] in self._eos_ids):
            draft = self._inner.propose(committed, [*tentative, *forced], max_tokens - len(forced))
        keep = self._guide.allowed([*tentative, *forced], draft.ids)
        probs = None if draft.probs is None else draft.probs[:keep]
        if probs is not None and forced:
            probs = torch.cat([_certain(forced, probs), probs])
        return Draft((*forced, *draft.ids[:keep]), probs, draft.copied and not forced)


def _certain(ids: Sequence[int], like: Tensor) -> Tensor:
    """[len(ids), vocab] distributions that leave no choice."""
    rows = torch.zeros(len(ids), like.shape[1], dtype=like.dtype, device=like.device)
    return rows.scatter_(1, torch.tensor(ids, device=like.device)[:, None], 1.0)
