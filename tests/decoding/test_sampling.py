"""Sampled decoding: the target's distribution for every drafter, beside wrong samplers that the same test rejects."""

from __future__ import annotations

import itertools

import pytest
import torch
from running import DRAFTERS, make_drafter, run
from scipy.stats import chisquare
from toy import ToyModel, markov_table
from transformers import GenerationConfig, LogitsProcessorList

from fly_llm.config import SamplingConfig
from fly_llm.decoding import verify as verify_module
from fly_llm.decoding.acceptance import accept
from fly_llm.decoding.sampling import Sampler, entropy, speculative_sample
from fly_llm.decoding.verify import Rule

VOCAB = 6
PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2]
WARM = SamplingConfig(temperature=0.7, top_p=0.9)
TARGET, DRAFT = markov_table(VOCAB, sharpness=1.2), markov_table(VOCAB, sharpness=1.2, tilt=0.6)


def exact_distribution(length: int, config: SamplingConfig = WARM) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, from the table and transformers' processors alone."""
    sampler = Sampler(config, 0, VOCAB)
    found = {}
    for ids in itertools.product(range(VOCAB), repeat=length):
        probability = 1.0
        for i, token in enumerate(ids):
            prefix = (*PROMPT, *ids[:i])
            scores = sampler.process(TARGET(prefix)[None], (prefix,), ())
            probability *= float(scores.softmax(-1)[0, token])
        found[ids] = probability
    return found


def p_value(samples, expected) -> float:
    """Chi-square of whole continuations, rare ones pooled. Impossible ones must not occur at all."""
    counts = dict.fromkeys(expected, 0)
    for ids in samples:
        counts[ids] += 1
    assert all(counts[ids] == 0 for ids, probability in expected.items() if probability == 0.0)
    often = [ids for ids, probability in expected.items() if probability * len(samples) >= 8]
    observed = [counts[ids] for ids in often]
    wanted = [expected[ids] * len(samples) for ids in often]
    observed.append(len(samples) - sum(observed))
    wanted.append(len(samples) - sum(wanted))
    assert len(often) >= 15
    return float(chisquare(observed, wanted).pvalue)


def sample(kind: str, k: int, count: int = 2500, length: int = 3, config: SamplingConfig = WARM, **options):
    drafter = make_drafter(kind, lambda: ToyModel(DRAFT, VOCAB)) if kind else None
    target = ToyModel(TARGET, VOCAB)
    samples, kept = [], 0
    for seed in range(count):
        target.reset()
        result = run(target, drafter, PROMPT, k=k, max_tokens=length + 2, sampling=config, seed=seed, **options)
        samples.append(tuple(result.ids[:length]))
        kept += result.stats.num_accepted_tokens
    return samples, kept / count


EXACT = exact_distribution(3)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_strict_sampling_follows_the_target(kind):
    samples, kept = sample(kind, 4)
    assert kept > 0.25  # drafts are accepted, so the acceptance test and not only recovery is on trial
    assert p_value(samples, EXACT) > 1e-3


def test_plain_sampling_follows_the_target():
    samples, _ = sample("", 0)
    assert p_value(samples, EXACT) > 1e-3


@pytest.mark.parametrize("kind", DRAFTERS)
def test_keeping_a_draft_if_either_of_two_samples_equals_it_is_rejected(kind, monkeypatch):
    """The published script's temperature mode: not speculative sampling, and the test must see it."""

    def either(probs, draft_ids, draft_probs, sampler):
        first, second = sampler.draw(probs), sampler.draw(probs)
        n = len(draft_ids)
        return (first[:n] == draft_ids) | (second[:n] == draft_ids), first

    monkeypatch.setattr(verify_module, "speculative_sample", either)
    samples, _ = sample(kind, 4)
    assert p_value(samples, EXACT) < 1e-6


@pytest.mark.parametrize("kind", ["model", "nested"])
def test_a_draft_distribution_that_was_not_sampled_from_is_rejected(kind, monkeypatch):
    """Reporting the unfiltered draft distribution after sampling from the filtered one."""

    def mismatched(probs, draft_ids, draft_probs, sampler):
        softened = None if draft_probs is None else (draft_probs.clamp_min(1e-9).log() * 0.3).softmax(-1)
        return speculative_sample(probs, draft_ids, softened, sampler)

    monkeypatch.setattr(verify_module, "speculative_sample", mismatched)
    samples, _ = sample(kind, 4)
    assert p_value(samples, EXACT) < 1e-6


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    def tokens(seed):
        drafter = make_drafter("nested", lambda: ToyModel(DRAFT, VOCAB))
        return run(ToyModel(TARGET, VOCAB), drafter, PROMPT, k=4, sampling=WARM, seed=seed).ids

    assert tokens(3) == tokens(3)
    assert len({tuple(tokens(seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("seed", range(40))
def test_with_given_draws_fly_never_keeps_fewer_than_strict(seed):
    """One draft, one set of draws: strict and FLy at several θ and W."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(16, VOCAB, generator=generator).mul(1.5).softmax(-1)
    draft_probs = (probs[:15].log() + torch.randn(15, VOCAB, generator=generator) * 0.5).softmax(-1)
    draft_ids = torch.multinomial(draft_probs, 1, generator=generator)[:, 0]
    matches, _ = speculative_sample(probs, draft_ids, draft_probs, Sampler(WARM, seed, VOCAB))
    again, _ = speculative_sample(probs, draft_ids, draft_probs, Sampler(WARM, seed, VOCAB))
    assert matches.tolist() == again.tolist()
    entropies = entropy(probs[:15].log(), "top3").tolist()
    strict = accept(matches.tolist(), entropies, [False] * 15, theta=0.3, window=None)
    for theta, window in itertools.product((0.0, 0.3, 0.9), (1, 2, 6)):
        loose = accept(matches.tolist(), entropies, [False] * 15, theta=theta, window=window)
        assert loose.length >= strict.length


def test_fly_relaxes_sampled_drafts_too():
    target, drafter = ToyModel(TARGET, VOCAB), make_drafter("model", lambda: ToyModel(DRAFT, VOCAB))
    relaxed = 0
    for seed in range(20):
        target.reset()
        result = run(target, drafter, PROMPT, k=8, sampling=WARM, seed=seed, rule=Rule(0.3, 2))
        relaxed += result.stats.num_relaxed_tokens
    assert relaxed >= 5


FILTERS = [
    {"repetition_penalty": 1.5},
    {"logit_bias": {3: 2.5, 1: -1.0}},
    {"logit_bias": {4: float("-inf")}, "repetition_penalty": 1.2},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3, "logit_bias": {0: 1.0}},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_scores_equal_those_of_transformers_at_every_position(options):
    """Row i of a verified round is processed with the prefix of position i, in the order `generate` uses."""
    from tiny_models import tiny_llama

    model = tiny_llama()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 320, generator=generator) * 3
    prefix, draft = [5, 9, 9, 4], [9, 200, 7, 5, 200]
    ours = Sampler(SamplingConfig(**options), 0, 320).process(logits, (prefix[:2], prefix[2:]), draft)
    bias = {(token,): value for token, value in options.get("logit_bias", {}).items()} or None
    sampled = options.get("temperature", 0.0) > 0
    config = GenerationConfig(
        do_sample=sampled,
        sequence_bias=bias,
        repetition_penalty=options.get("repetition_penalty", 1.0),
        temperature=options.get("temperature", 1.0),
        top_k=options.get("top_k", 0) or 0,
        top_p=options.get("top_p", 1.0),
        min_p=options.get("min_p"),
    )
    theirs: LogitsProcessorList = model._get_logits_processor(generation_config=config, input_ids_seq_length=4)
    for i in range(6):
        expected = theirs(torch.tensor([prefix + draft[:i]]), logits[i : i + 1].clone())
        assert torch.equal(ours[i : i + 1], expected)


def test_greedy_with_penalty_and_bias_equals_generate():
    """The processed prefix is the right one in the middle of rounds: the answer equals `generate`'s."""
    from running import cached
    from tiny_models import noisy_copy, random_prompts, tiny_llama

    from fly_llm.models.cached_model import CachedModel

    target = tiny_llama()
    draft = noisy_copy(target)
    config = SamplingConfig(repetition_penalty=1.3, logit_bias={17: 3.0, 40: float("-inf")})
    differs = accepted = 0
    for prompt in random_prompts(4):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        plain = target.generate(ids, **settings)[0, len(prompt) :].tolist()
        bias = [[[17], 3.0], [[40], float("-inf")]]
        expected = target.generate(ids, repetition_penalty=1.3, sequence_bias=bias, **settings)[0, len(prompt) :]
        for kind in DRAFTERS:
            result = run(CachedModel(target), make_drafter(kind, cached(draft)), prompt, k=6, sampling=config)
            assert result.ids == expected.tolist()
            accepted += result.stats.num_accepted_tokens
        differs += expected.tolist() != plain
    assert differs >= 3 and accepted >= 20


def test_top3_entropy_by_hand():
    flat = torch.log(torch.tensor([[0.02, 0.02, 0.02] + [0.94 / 47] * 47]))
    thirds = torch.log(torch.tensor([[1 / 3, 1 / 3, 1 / 3, 1e-30]]))
    sure = torch.tensor([[100.0, 0.0, 0.0, 0.0]])
    assert entropy(flat, "top3").item() == pytest.approx(0.2347, abs=1e-3)  # the flattest counts as certain
    assert entropy(thirds, "top3").item() == pytest.approx(1.0986, abs=1e-3)
    assert entropy(sure, "top3").item() == pytest.approx(0.0, abs=1e-6)


def test_normalized_entropy_by_hand():
    assert entropy(torch.zeros(2, 50), "normalized").tolist() == pytest.approx([1.0, 1.0])
    half = torch.full((1, 16), -torch.inf)
    half[0, :4] = 1.0
    assert entropy(half, "normalized").item() == pytest.approx(0.5)


def test_entropy_is_taken_before_temperature_and_filters(monkeypatch):
    """At temperature 5 the processed distribution is nearly flat, yet θ sees the model's own certainty."""
    seen = []
    original = verify_module.entropy
    monkeypatch.setattr(verify_module, "entropy", lambda logits, kind: seen.append(original(logits, kind)) or seen[-1])
    rows = {}
    for temperature in (0.0, 5.0):
        seen.clear()
        target, drafter = ToyModel(TARGET, VOCAB), make_drafter("lookup", None)
        run(target, drafter, PROMPT, k=4, sampling=SamplingConfig(temperature=temperature), rule=Rule(0.3, 1))
        rows[temperature] = seen[0].tolist()
    assert rows[0.0] == rows[5.0]


def test_entropy_where_almost_everything_is_forbidden():
    one, two = torch.full((1, 8), -torch.inf), torch.full((1, 8), -torch.inf)
    one[0, 3] = 5.0
    two[0, :2] = 1.0
    assert entropy(one, "top3").tolist() == entropy(one, "normalized").tolist() == [0.0]
    assert entropy(two, "top3").item() == pytest.approx(0.6931, abs=1e-3)


def test_a_temperature_next_to_nothing_is_greedy():
    greedy = run(ToyModel(TARGET, VOCAB), None, PROMPT, k=0, max_tokens=12).ids
    for temperature in (1e-5, 1e-38, 1e-320):
        config = SamplingConfig(temperature=temperature)
        assert run(ToyModel(TARGET, VOCAB), None, PROMPT, k=0, max_tokens=12, sampling=config).ids == greedy
