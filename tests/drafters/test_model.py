"""Draft models: cache bookkeeping, limits, distributions."""

from __future__ import annotations

import logging

import torch
from running import cached, make_drafter, run
from tiny_models import noisy_copy, random_prompts, tiny_gemma3, tiny_mistral
from toy import ToyModel, markov_table

from fly_llm.config import SamplingConfig
from fly_llm.drafters.base import DraftRequest
from fly_llm.drafters.lookup import LookupDrafter
from fly_llm.drafters.model import ModelDrafter
from fly_llm.models.cached_model import CachedModel

VOCAB = 8
TABLE = markov_table(VOCAB)


class CheckedDrafter(ModelDrafter):
    """Asserts, around every proposal, that the cache holds a prefix of the context."""

    def propose(self, committed, tentative, max_tokens):
        draft = super().propose(committed, tentative, max_tokens)
        context = [*committed, *tentative, *draft.ids]
        assert self._cached == context[: len(self._cached)] == self.model.ids
        assert len(self._cached) >= len(committed) + len(tentative)
        assert self._cached[: self._settled] == list(committed)[: self._settled]
        return draft


def test_the_cache_holds_a_prefix_of_the_context_after_every_round():
    for inner in (None, LookupDrafter()):
        drafter = CheckedDrafter(ToyModel(markov_table(VOCAB, tilt=0.7), VOCAB), inner)
        result = run(ToyModel(TABLE, VOCAB), drafter, [1, 2, 3, 1, 2], k=5, max_tokens=80)
        assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_committed_tokens_are_fed_to_the_draft_model_once():
    """One forward per drafted token and none more: nothing is recomputed."""
    model = ToyModel(TABLE, VOCAB)
    result = run(ToyModel(TABLE, VOCAB), ModelDrafter(model), [1, 2, 3], k=4, max_tokens=50)
    assert result.stats.num_draft_forwards == result.stats.num_draft_tokens + 1  # the one is the prefill


def test_a_text_longer_than_the_draft_context_goes_on_with_lookup(caplog):
    caplog.set_level(logging.WARNING, "fly_llm")
    short = ToyModel(markov_table(VOCAB, tilt=0.5), VOCAB, max_length=20)
    drafter = ModelDrafter(short, LookupDrafter())
    result = run(ToyModel(TABLE, VOCAB), drafter, [1, 2, 3, 1, 2], k=4, max_tokens=60)
    expected = run(ToyModel(TABLE, VOCAB), None, [1, 2, 3, 1, 2], k=0, max_tokens=60)
    assert result.ids == expected.ids
    late = result.rounds[len(result.rounds) // 2 :]
    assert sum(round_.num_draft_tokens for round_ in late) > 0
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "20 tokens" in caplog.text
    bare = run(ToyModel(TABLE, VOCAB), ModelDrafter(short), [1, 2, 3, 1, 2], k=4, max_tokens=60)
    assert bare.ids == expected.ids


def test_drafting_stops_after_an_end_of_sequence_token_and_keeps_it():
    model = ToyModel(TABLE, VOCAB)
    free = ModelDrafter(model)
    free.start(DraftRequest())
    ids = free.propose([1, 2], [], 6).ids
    ends = ModelDrafter(model)
    ends.start(DraftRequest(eos_ids=frozenset({ids[2]})))
    first = ids.index(ids[2]) + 1
    assert ends.propose([1, 2], [], 6).ids == ids[:first]


def test_sampled_drafts_report_the_distribution_they_came_from():
    config = SamplingConfig(temperature=0.7, top_p=0.8)
    drafter = ModelDrafter(ToyModel(TABLE, VOCAB), LookupDrafter())
    drafter.start(DraftRequest(sampling=config, seed=5))
    draft = drafter.propose([1, 2, 3, 1, 2], [], 6)
    assert draft.probs is not None and draft.probs.shape == (6, VOCAB)
    assert torch.allclose(draft.probs.sum(-1), torch.ones(6))
    assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.ids))
    assert (draft.probs == 0).any()  # top-p is part of it


def test_drafts_are_processed_with_the_prefix_they_have():
    """The target drafting for itself is never wrong, with a penalty that depends on every token before."""
    for inner in (None, LookupDrafter()):
        drafter = ModelDrafter(ToyModel(TABLE, VOCAB), inner)
        config = SamplingConfig(repetition_penalty=1.8, logit_bias={3: 0.5})
        result = run(ToyModel(TABLE, VOCAB), drafter, [1, 2, 3, 1, 2], k=6, max_tokens=50, sampling=config)
        plain = run(ToyModel(TABLE, VOCAB), None, [1, 2, 3, 1, 2], k=0, max_tokens=50)
        assert result.ids != plain.ids
        assert all(round_.num_accepted_tokens == round_.num_draft_tokens for round_ in result.rounds)


def test_sliding_window_drafts_survive_many_rejections():
    """Nested drafting rolls the draft's cache back twice per round, each time past the window."""
    for make in (tiny_mistral, tiny_gemma3):
        target = make(seed=3)
        draft = noisy_copy(target, scale=0.15)
        for prompt in random_prompts(2, 20):
            plain = run(CachedModel(target), None, prompt, k=0, max_tokens=60)
            alone = run(CachedModel(target), make_drafter("model", cached(draft)), prompt, k=7, max_tokens=60)
            nested = run(CachedModel(target), make_drafter("nested", cached(draft)), prompt, k=7, max_tokens=60)
            assert plain.ids == alone.ids == nested.ids
            assert [r.num_accepted_tokens for r in alone.rounds] == [r.num_accepted_tokens for r in nested.rounds]
