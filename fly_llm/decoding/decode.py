"""The loop: a generator of rounds. Every emitted token belongs to one, and none is ever retracted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from fly_llm.decoding.host import host_copies
from fly_llm.decoding.sampling import Sampler
from fly_llm.decoding.verify import STRICT, Exact, MaskLogits, Rule, ScoringModel, Verdict, verify
from fly_llm.types import Draft, FinishReason, Round, Stats

Cut = Callable[[Sequence[int]], int | None]
"""Called once per round with its tokens, end-of-sequence and budget applied. Returns how many of them to keep if the
answer ends here (a stop string was completed), None to keep all and go on."""


class Proposer(Protocol):
    """The part of a drafter the loop needs; `fly_llm.drafters.base` has the whole of it."""

    @property
    def num_forwards(self) -> int:
        """Draft model forwards in this request so far."""

    def propose(self, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        """Up to `max_tokens` tokens that may follow `committed` + `tentative`."""


def decode(
    target: ScoringModel,
    drafter: Proposer | None,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    max_tokens: int,
    num_speculative_tokens: int = 0,
    rule: Rule = STRICT,
    eos_ids: Collection[int] = frozenset(),
    prefill_chunk: int = 512,
    stats: Stats | None = None,
    cut: Cut | None = None,
    exact: Exact | None = None,
    mask_logits: MaskLogits | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Round]:
    """Generate tokens after `prompt`, round by round.

    Prefill runs all but the last prompt token, so that token's successor already belongs to a round. After each round
    the target's cache holds every committed token but the last, which is pending.

    Args:
        target: model with a cache that holds nothing, or a prefix of `prompt` that ends before its last token.
        drafter: started for this request; None is plain decoding.
        prompt: at least one token.
        sampler: the target's distribution and draws.
        max_tokens: budget of emitted tokens, at least 1.
        num_speculative_tokens: K; 0 is plain decoding.
        rule: what may be relaxed.
        eos_ids: the answer ends after any of these.
        prefill_chunk: tokens per prefill forward.
        stats: counters to fill in as rounds are committed.
        cut: where the answer ends; see `Cut`.
        exact: which positions must be strict; see `Exact`.
        mask_logits: which tokens are forbidden; see `MaskLogits`.
        cancelled: read before every forward; once true, the generator returns without another round.

    Yields:
        Committed rounds; the last one has a `finish_reason` unless the request was cancelled.

    Raises:
        UnsupportedCacheError: the cache cannot be rolled back and K > 0; raised before anything is yielded.
    """
    if not prompt or max_tokens < 1:
        raise ValueError(f"need a prompt and max_tokens >= 1, got {len(prompt)} tokens and max_tokens={max_tokens}")
    stats = stats if stats is not None else Stats()
    stats.num_prompt_tokens, stats.num_cached_tokens = len(prompt), target.length
    copies, speculative = host_copies(), drafter is not None and num_speculative_tokens > 0
    start = time.perf_counter()
    if not prefill(target, prompt[target.length : -1], prefill_chunk, cancelled):
        return
    stats.prefill_seconds = time.perf_counter() - start

    committed = list(prompt)
    checked = not speculative or target.length > 0
    if speculative and checked:
        target.check_rollback()
    finish: FinishReason | None = None
    start = time.perf_counter()
    while finish is None and not cancelled():
        began = time.perf_counter()
        room = min(num_speculative_tokens, max_tokens - stats.num_output_tokens - 1)
        room = min(room, _until_switch(target, len(committed)))
        draft = Draft()
        if drafter is not None and checked and room > 0:
            draft = _through_first(drafter.propose(committed, (), room), eos_ids)
            if cancelled():
                return
        drafted = time.perf_counter()
        verdict = verify(
            target,
            _pending(target, committed),
            draft,
            (committed,),
            sampler,
            rule,
            exact=exact,
            mask_logits=mask_logits,
        )
        if not checked:  # only a cache that has been used knows, and this one had a prompt of one token
            target.check_rollback()
            checked = True
        tokens, finish = _cut(verdict.token_ids, eos_ids, max_tokens - stats.num_output_tokens, cut)
        committed.extend(tokens)
        target.truncate(len(committed) - 1)
        target.settle()
        seconds = (drafted - began, time.perf_counter() - drafted)
        round_ = _round(verdict, tokens, len(draft.ids), finish, seconds)
        stats.add(round_)
        stats.num_target_forwards = target.num_forwards
        stats.num_draft_forwards = drafter.num_forwards if drafter is not None else 0
        stats.num_host_copies = host_copies() - copies
        stats.decode_seconds += time.perf_counter() - began
        yield round_


def _round(
    verdict: Verdict,
    tokens: tuple[int, ...],
    num_draft_tokens: int,
    finish: FinishReason | None,
    seconds: tuple[float, float],
) -> Round:
    """What is said of a round: of its verdict, as far as its tokens were not cut."""
    kept = [i for i, position in enumerate(verdict.relaxed) if position < len(tokens)]
    return Round(
        token_ids=tokens,
        relaxed=tuple(verdict.relaxed[i] for i in kept),
        overruled=tuple(verdict.overruled[i] for i in kept),
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=min(len(tokens), len(verdict.token_ids) - 1),
        rejection=verdict.rejection if len(tokens) == len(verdict.token_ids) else None,
        finish_reason=finish,
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
    )


def _until_switch(target: ScoringModel, length: int) -> int:
    """How many tokens may be drafted so that no round goes across the length at which positions change."""
    return sys.maxsize if target.switch is None or length > target.switch else target.switch - length


def _pending(target: ScoringModel, committed: Sequence[int]) -> Sequence[int]:
    """The tokens the next forward takes besides the draft: the last one, or all of them where positions change."""
    if target.switch is not None and target.length <= target.switch < len(committed):
        target.reset()
        return committed
    return committed[-1:]


def prefill(model: ScoringModel, tokens: Sequence[int], chunk: int, cancelled: Callable[[], bool]) -> bool:
    """Run `tokens` into the cache in chunks. Returns False if cancelled on the way."""
    chunk = chunk if model.resumes else max(1, len(tokens))
    for begin in range(0, len(tokens), chunk):
        if cancelled():
            return False
        model.advance(tokens[begin : begin + chunk], num_logits=1)
        model.settle()
    return True


def _through_first(draft: Draft, eos_ids: Collection[int]) -> Draft:
    """The draft up to and including its first end-of-sequence token."""
    for i, token in enumerate(draft.ids):
        if token in eos_ids:
            probs = None if draft.probs is None else draft.probs[: i + 1]
            return Draft(draft.ids[: i + 1], probs, draft.copied)
    return draft


def _cut(
    tokens: tuple[int, ...], eos_ids: Collection[int], budget: int, cut: Cut | None
) -> tuple[tuple[int, ...], FinishReason | None]:
    """End a round at the earliest of end-of-sequence, budget and stop string."""
    finish: FinishReason | None = None
    if len(tokens) >= budget:
        tokens, finish = tokens[:budget], "length"
    for i, token in enumerate(tokens):
        if token in eos_ids:
            tokens, finish = tokens[: i + 1], "stop"
            break
    keep = cut(tokens) if cut is not None else None
    return (tokens, finish) if keep is None else (tokens[:keep], "stop")
