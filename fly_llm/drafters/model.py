"""A draft model, alone or itself drafted for by another drafter (nested drafting)."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fly_llm.decoding.decode import prefill
from fly_llm.decoding.sampling import Sampler
from fly_llm.decoding.verify import ScoringModel, verify
from fly_llm.drafters.base import Drafter, DraftRequest
from fly_llm.errors import UnsupportedCacheError
from fly_llm.types import Draft

log = logging.getLogger("fly_llm")


Model = TypeVar("Model", bound=ScoringModel)


class ModelDrafter(Generic[Model]):
    """Drafts with a small model.

    With an inner drafter (prompt lookup), the draft model verifies the inner proposals strictly and so drafts several
    tokens per forward; what it proposes, and the distribution it comes from, is the same as without.

    Args:
        model: the draft model's cache; its logits must be no wider than the target's vocabulary.
        inner: drafts for the draft model; also drafts alone once the text has outgrown the draft model's context.
        prefill_chunk: tokens per prefill forward.
    """

    def __init__(self, model: Model, inner: Drafter | None = None, *, prefill_chunk: int = 512) -> None:
        self.model = model
        self._inner = inner
        self._chunk = prefill_chunk
        self._cached: list[int] = []  # the tokens the draft model's cache holds
        self._settled = 0  # of these, how many are known to be committed
        self._begin(DraftRequest())

    @property
    def num_forwards(self) -> int:
        """Draft model forwards in this request so far."""
        return self.model.num_forwards - self._earlier_forwards

    @property
    def cached(self) -> Sequence[int]:
        """The tokens the draft model's cache holds."""
        return self._cached

    def start(self, request: DraftRequest) -> None:
        """Forget the last request; see `Drafter.start`."""
        self._begin(request)
        if self._inner is not None:
            self._inner.start(request)

    def _begin(self, request: DraftRequest) -> None:
        self._request = request
        self._sampler = Sampler(request.sampling, request.seed, self.model.vocab_size)
        if not request.cached:
            self.model.reset()
        self._cached, self._settled, self._checked = list(request.cached), 0, False
        self._earlier_forwards = self.model.num_forwards

    def close(self) -> None:
        """Release the cache."""
        self._begin(DraftRequest())
        if self._inner is not None:
            self._inner.close()

    def propose(self, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        """See `Drafter.propose`. Stops after an end-of-sequence token, which it keeps."""
        limit = self.model.max_length
        if limit is not None and len(committed) + len(tentative) + max_tokens > limit:
            return self._without_model(limit, committed, tentative, max_tokens)
        if not self._rewind(committed, tentative):
            return Draft()
        ids: list[int] = []
        probs: list[Tensor] = []
        while len(ids) < max_tokens and not self._request.cancelled():
            new, new_probs = self._step(committed, [*tentative, *ids], max_tokens - len(ids))
            ids.extend(new)
            if new_probs is not None:
                probs.append(new_probs)
            if any(token in self._request.eos_ids for token in new):
                break
        return Draft(tuple(ids), torch.cat(probs) if probs else None)

    def _step(self, committed: Sequence[int], tentative: list[int], room: int) -> tuple[list[int], Tensor | None]:
        """One forward of the draft model: at least one token, at most `room`, cut after an end-of-sequence token."""
        guess = self._inner.propose(committed, tentative, room - 1) if self._inner and room > 1 else Draft()
        guess = Draft(tuple(itertools.takewhile(lambda token: token < self.model.vocab_size, guess.ids)))
        context = len(committed) + len(tentative)
        pending = _slice(committed, tentative, len(self._cached))
        mask = None if self._request.mask is None else functools.partial(self._request.mask, tentative)
        prefix = (committed, tentative)
        verdict = verify(self.model, self._known(pending), guess, prefix, self._sampler, mask_logits=mask)
        self._cached.extend(pending)
        self._cached.extend(verdict.token_ids[:-1])
        self.model.truncate(context + len(verdict.token_ids) - 1)
        keep = next(
            (i + 1 for i, token in enumerate(verdict.token_ids) if token in self._request.eos_ids),
            len(verdict.token_ids),
        )
        return list(verdict.token_ids[:keep]), None if verdict.probs is None else verdict.probs[:keep]

    def _rewind(self, committed: Sequence[int], tentative: Sequence[int]) -> bool:
        """Bring the cache to the longest prefix of the context it already holds, and prefill what is far behind.

        Returns:
            False if the request was cancelled on the way.
        """
        context = len(committed) + len(tentative)
        common = self._settled
        for cached, wanted in zip(self._cached[common:], _slice(committed, tentative, common), strict=False):
            if cached != wanted:
                break
            common += 1
        common = min(common, context - 1)  # one token stays pending, its logits are wanted
        try:
            self.model.truncate(common)
        except UnsupportedCacheError:  # it has given up what it would need: read the text again
            self.model.reset()
            common = 0
        del self._cached[common:]
        self._settled = min(common, len(committed))
        if not tentative:
            self.model.settle()
        behind = _slice(committed, tentative, common)[:-1]
        if len(behind) > self._chunk or not self._cached:
            if not prefill(self.model, self._known(behind), self._chunk, self._request.cancelled):
                self._cached = self._cached[: self.model.length]
                return False
            self._cached.extend(behind)
        if self._cached and not self._checked:
            self.model.check_rollback()
            self._checked = True
        return True

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the draft model can embed them: a target padded wider than the draft model has ids it lacks."""
        return [token if token < self.model.vocab_size else 0 for token in tokens]

    def _without_model(self, limit: int, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        _warn_outgrown(limit)
        return self._inner.propose(committed, tentative, max_tokens) if self._inner else Draft()


@functools.cache
def _warn_outgrown(limit: int) -> None:
    """Say it once in a process."""
    log.warning("a text has outgrown the draft model's context of %d tokens: going on with prompt lookup", limit)


def _slice(committed: Sequence[int], tentative: Sequence[int], start: int) -> list[int]:
    """Committed + tentative from `start` on, without copying what comes before."""
    return [*committed[start:], *tentative[max(0, start - len(committed)) :]]
