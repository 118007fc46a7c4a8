"""From logits to a token: processed scores, entropies, and draws from explicit generators.

Scores are processed by transformers' own logits processors, in the order `generate` applies them, at every verified
position with the prefix that position has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fly_llm.config import Entropy, SamplingConfig

Prefix = Sequence[Sequence[int]]
"""A token prefix in pieces that follow each other; joined only where a processor needs it."""


class Sampler:
    """The processed distribution of one model in one request, and the random draws made from it.

    Args:
        config: temperature, filters, penalty, bias.
        seed: seeds the two generators of this sampler (acceptance; tokens). Target and draft model get samplers with
            different seeds, so their noise is independent.
        vocab_size: ids of `logit_bias` from here on are dropped (a draft model's padding may be shorter).
    """

    def __init__(self, config: SamplingConfig, seed: int, vocab_size: int) -> None:
        self.greedy = config.is_greedy
        self._processors = _processors(config, vocab_size)
        seeds = random.Random(seed)
        self._seeds = (seeds.getrandbits(63), seeds.getrandbits(63))
        self._generators: tuple[torch.Generator, torch.Generator] | None = None

    @property
    def filters(self) -> bool:
        """Whether processing can forbid a token or change a score at all."""
        return bool(self._processors)

    def process(self, logits: Tensor, prefix: Prefix, draft_ids: Sequence[int]) -> Tensor:
        """Apply the logits processors.

        Args:
            logits: [n+1, vocab] float32; row i follows `prefix` and the first i draft tokens.
            prefix: all tokens before row 0.
            draft_ids: the n drafted tokens.

        Returns:
            [n+1, vocab] processed scores; the same tensor if there is nothing to apply.
        """
        ids: Tensor | None = None
        scores = logits
        for processor in self._processors:
            if not isinstance(processor, RepetitionPenaltyLogitsProcessor):
                scores = processor(None, scores)
                continue
            if ids is None:
                joined = [token for piece in (*prefix, draft_ids) for token in piece]
                ids = torch.tensor([joined], device=logits.device)
            start = ids.shape[1] - len(draft_ids)
            rows = [processor(ids[:, : start + i], scores[i : i + 1]) for i in range(len(scores))]
            scores = torch.cat(rows)
        return scores

    def uniforms(self, n: int, device: torch.device) -> Tensor:
        """[n] acceptance draws from [0, 1)."""
        return torch.rand(n, generator=self._generator(0, device), device=device)

    def draw(self, probs: Tensor) -> Tensor:
        """Draw one token per row. probs: [m, vocab], rows need not be normalised. Returns [m] ids.

        The largest of probs / Exp(1) noise is a draw from probs (exponential races), without a wait for the device.
        """
        noise = torch.empty_like(probs).exponential_(generator=self._generator(1, probs.device))
        return (probs / noise.clamp_min_(torch.finfo(probs.dtype).tiny)).argmax(-1)

    def _generator(self, index: int, device: torch.device) -> torch.Generator:
        if self._generators is None:
            first, second = (torch.Generator(device).manual_seed(seed) for seed in self._seeds)
            self._generators = (first, second)
        return self._generators[index]


def _processors(config: SamplingConfig, vocab_size: int) -> list[LogitsProcessor]:
    """The processors of a request in `generate`'s order.

    Filters stay on for greedy decoding, where they cannot change the argmax but keep FLy from relaxing a token they
    forbid.
    """
    chain: list[LogitsProcessor] = []
    if bias := {token: value for token, value in (config.logit_bias or {}).items() if token < vocab_size}:
        chain.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    if config.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if not config.is_greedy and config.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        chain.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        chain.append(TopPLogitsWarper(config.top_p))
    if config.min_p > 0.0:
        chain.append(MinPLogitsWarper(config.min_p))
    return chain


def speculative_sample(
    probs: Tensor, draft_ids: Tensor, draft_probs: Tensor | None, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """The speculative-sampling test (arXiv 2211.17192, Algorithm 1) at every position, and the token that follows.

    All draws are made before anything is judged, so FLy sees the same ones as strict verification.

    Args:
        probs: [n+1, vocab] processed target distribution.
        draft_ids: [n] proposed tokens.
        draft_probs: [n, vocab] distribution each was sampled from; None counts as one-hot.
        sampler: source of the draws.

    Returns:
        [n] bool, token i is accepted with probability min(1, p_target / p_draft); and [n+1] ids, the recovered token
        of each position, drawn from norm(max(0, p_target - p_draft)), and last the bonus token, drawn from probs[n].
    """
    n = len(draft_ids)
    draws = sampler.uniforms(n, probs.device)
    rows = torch.arange(n, device=probs.device)
    target = probs[rows, draft_ids]
    residual = probs.clone()
    if draft_probs is None:
        matches = draws < target
        residual[rows, draft_ids] = 0.0
    else:
        draft_probs = _fit(draft_probs.to(probs), probs.shape[1])
        matches = draws * draft_probs[rows, draft_ids] < target
        residual[:n] = (probs[:n] - draft_probs).clamp_min_(0.0)
    # Where the two distributions are equal nothing is left over; such a token is never rejected, so any row will do.
    empty = residual.sum(-1, keepdim=True) <= 0.0
    return matches, sampler.draw(torch.where(empty, probs, residual))


def entropy(logits: Tensor, kind: Entropy) -> Tensor:
    """Entropy of each position, from raw logits.

    Args:
        logits: [n, vocab] float32, before temperature and filters.
        kind: see `FLyConfig.entropy`.

    Returns:
        [n] float32: nats (0 to 1.0986) for "top3", a fraction of log(vocab) for "normalized".
    """
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    if kind == "top3":
        logs = logits.topk(min(3, logits.shape[-1]), dim=-1).values - normalizer
        return _entropy(logs)
    return _entropy(logits - normalizer) / torch.log(torch.tensor(float(logits.shape[-1]), device=logits.device))


def _entropy(logs: Tensor) -> Tensor:
    """−Σ p log p over the last dimension, from log p; a forbidden token adds nothing."""
    return -torch.where(logs > -torch.inf, logs.exp() * logs, 0.0).sum(-1)


def _fit(probs: Tensor, vocab_size: int) -> Tensor:
    """Pad or slice the last dimension to `vocab_size`; sizes differ by padding only, where probabilities are 0."""
    missing = vocab_size - probs.shape[-1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs[..., :vocab_size]
