"""One round: pending tokens and a draft go through one forward, a verdict comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fly_llm.config import Entropy
from fly_llm.decoding.acceptance import accept
from fly_llm.decoding.host import to_host
from fly_llm.decoding.sampling import Prefix, Sampler, entropy, speculative_sample
from fly_llm.types import Draft, Rejection


class ScoringModel(Protocol):
    """A model with a cache of the tokens it has seen. `fly_llm.models.cached_model` is the real one."""

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""

    @property
    def max_length(self) -> int | None:
        """The most tokens the model can hold, None if unknown."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def num_forwards(self) -> int:
        """Forwards run since the last `reset`."""

    @property
    def resumes(self) -> bool:
        """Whether several tokens may follow cached ones; if not, a prompt is prefilled in one piece."""

    @property
    def switch(self) -> int | None:
        """The length above which every position is encoded otherwise, so that the cache must be read again."""

    def reset(self) -> None:
        """Forget everything and release the cache's memory."""

    def advance(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Run tokens after the cached ones; [num_logits, vocab] logits of the last positions."""

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""

    def settle(self) -> None:
        """Give up what is only needed to truncate below the current length."""

    def check_rollback(self) -> None:
        """Raise `UnsupportedCacheError` if `truncate` cannot work."""


Exact = Callable[[Sequence[int], Sequence[int]], Sequence[bool]]
"""(draft ids, the target's own token at each of their positions) -> which positions must be strict."""

MaskLogits = Callable[[Sequence[int], Tensor], Tensor]
"""(n draft ids, [n+1, vocab] raw logits) -> logits with forbidden tokens at -inf; must not advance its own state."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What may be relaxed in a request; the default is strict.

    Attributes:
        theta, window, entropy: see `FLyConfig`; `window=None` is strict.
        relax_copied: whether drafts straight from prompt lookup may be relaxed.
        protected_ids: tokens that are neither relaxed nor relaxed away: end-of-sequence, special and added tokens.
    """

    theta: float = torch.inf
    window: int | None = None
    entropy: Entropy = "top3"
    relax_copied: bool = True
    protected_ids: Collection[int] = frozenset()


STRICT = Rule()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one round, before it is cut at end-of-sequence, stop strings and the budget.

    Attributes:
        token_ids: kept draft tokens, then the recovered or bonus token.
        relaxed: positions in `token_ids` of relaxed tokens.
        overruled: for each of them, the token the target would have chosen.
        rejection: why the first rejected draft token was rejected, None if all were kept.
        probs: [len(token_ids), vocab] processed distributions the tokens were drawn from; None for greedy decoding.
    """

    token_ids: tuple[int, ...]
    relaxed: tuple[int, ...]
    overruled: tuple[int, ...]
    rejection: Rejection | None
    probs: Tensor | None


@torch.inference_mode()
def verify(
    model: ScoringModel,
    pending: Sequence[int],
    draft: Draft,
    prefix: Prefix,
    sampler: Sampler,
    rule: Rule = STRICT,
    *,
    exact: Exact | None = None,
    mask_logits: MaskLogits | None = None,
) -> Verdict:
    """Verify a draft with one forward of `model`.

    Args:
        model: its cache grows by `pending` and the draft; the caller truncates.
        pending: tokens of `prefix` that are not in the cache yet; at least 1.
        draft: n proposed tokens that follow `prefix`.
        prefix: every token before the draft, in pieces.
        sampler: the model's processed distribution and draws.
        rule: what may be relaxed.
        exact: asked only when something would be relaxed.
        mask_logits: applied to the raw logits before the processors.
    """
    n = len(draft.ids)
    logits = model.advance([*pending, *draft.ids], num_logits=n + 1).float()
    scores = sampler.process(mask_logits(draft.ids, logits) if mask_logits else logits, prefix, draft.ids)
    draft_ids = torch.tensor(draft.ids, dtype=torch.long, device=logits.device)
    probs: Tensor | None = None
    if sampler.greedy:
        choices = scores.argmax(-1)
        matches = choices[:n] == draft_ids
    else:
        probs = scores.softmax(-1)
        matches, choices = speculative_sample(probs, draft_ids, draft.probs, sampler)

    window = rule.window if rule.relax_copied or not draft.copied else None
    if window is not None and n:
        allowed = scores[:n].gather(1, draft_ids[:, None]).squeeze(1) > -torch.inf
        packed, entropies = to_host(torch.cat([choices, matches, allowed]), entropy(logits[:n], rule.entropy))
    else:
        packed, entropies = to_host(torch.cat([choices, matches]))
    tokens, matched, allowed_ids = packed[: n + 1], packed[n + 1 : 2 * n + 1], packed[2 * n + 1 :]
    matching = [bool(flag) for flag in matched]
    protected = [
        not fine or own in rule.protected_ids or other in rule.protected_ids
        for fine, own, other in zip(allowed_ids or [1] * n, draft.ids, tokens[:n], strict=True)
    ]
    verdict = accept(matching, entropies, protected, theta=rule.theta, window=window)
    if verdict.relaxed and exact is not None:
        protected = [a or b for a, b in zip(protected, exact(draft.ids, tokens[:n]), strict=True)]
        verdict = accept(matching, entropies, protected, theta=rule.theta, window=window)
    return Verdict(
        token_ids=(*draft.ids[: verdict.length], tokens[verdict.length]),
        relaxed=verdict.relaxed,
        overruled=tuple(tokens[i] for i in verdict.relaxed),
        rejection=verdict.rejection,
        probs=None if probs is None else probs[: verdict.length + 1],
    )
