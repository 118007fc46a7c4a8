"""Run the decoding loop over bare models, for tests that need no tokenizer and no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fly_llm.config import SamplingConfig
from fly_llm.decoding.decode import decode
from fly_llm.decoding.sampling import Sampler
from fly_llm.decoding.verify import STRICT, Rule
from fly_llm.drafters.base import Drafter, DraftRequest
from fly_llm.drafters.lookup import LookupDrafter
from fly_llm.drafters.model import ModelDrafter
from fly_llm.models.cached_model import CachedModel
from fly_llm.types import Round, Stats

GREEDY = SamplingConfig()
DRAFTERS = ("lookup", "model", "nested")


@dataclass
class Run:
    """What one request did."""

    ids: list[int] = field(default_factory=list)
    relaxed: list[int] = field(default_factory=list)
    overruled: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    target: Any = None


def make_drafter(kind: str, draft: Callable[[], Any]) -> Drafter:
    """A fresh drafter; `draft` makes the cached draft model."""
    if kind == "lookup":
        return LookupDrafter()
    return ModelDrafter(draft(), LookupDrafter() if kind == "nested" else None)


def cached(model: Any) -> Callable[[], CachedModel]:
    return lambda: CachedModel(model)


def run(
    target: Any,
    drafter: Any,
    prompt: Sequence[int],
    *,
    k: int,
    max_tokens: int = 40,
    rule: Rule = STRICT,
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
    eos_ids: frozenset[int] = frozenset(),
    **options: Any,
) -> Run:
    """Decode to the end, checking after every round that the cache holds all committed tokens but the last."""
    result = Run(target=target)
    if drafter is not None and hasattr(drafter, "start"):
        drafter.start(DraftRequest(sampling=sampling, seed=seed + 1_000_003, eos_ids=eos_ids))
    for round_ in decode(
        target,
        drafter,
        prompt,
        sampler=Sampler(sampling, seed, target.vocab_size),
        max_tokens=max_tokens,
        num_speculative_tokens=k,
        rule=rule,
        eos_ids=eos_ids,
        stats=result.stats,
        **options,
    ):
        result.relaxed.extend(len(result.ids) + i for i in round_.relaxed)
        result.overruled.extend(round_.overruled)
        result.ids.extend(round_.token_ids)
        result.rounds.append(round_)
        assert target.length == len(prompt) + len(result.ids) - 1
        if hasattr(target, "ids"):
            assert target.ids == [*prompt, *result.ids][:-1]
    assert result.rounds[-1].finish_reason is not None
    assert all(round_.finish_reason is None for round_ in result.rounds[:-1])
    return result
