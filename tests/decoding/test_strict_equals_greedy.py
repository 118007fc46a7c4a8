"""Strict decoding gives the tokens of greedy `model.generate`, for every architecture, drafter and K, in float32."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from running import DRAFTERS, cached, make_drafter, run
from tiny_models import noisy_copy, random_prompts, tiny_gemma3, tiny_lfm2, tiny_llama, tiny_mistral, tiny_qwen2

from fly_llm.decoding.verify import Rule
from fly_llm.drafters.lookup import LookupDrafter
from fly_llm.drafters.model import ModelDrafter
from fly_llm.models.cached_model import CachedModel

MAKERS = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "mistral-sliding": tiny_mistral,
    "gemma3-mixed": tiny_gemma3,
    "lfm2-conv": tiny_lfm2,
}
TOKENS = 48


@pytest.fixture(scope="module", params=MAKERS)
def pair(request):
    target = MAKERS[request.param]()
    return target, noisy_copy(target)


@pytest.fixture(scope="module")
def prompts():
    """24 tokens each, three times the sliding window, the second half a copy of the first."""
    return [prompt * 2 for prompt in random_prompts(6)]


def generate(model, prompt, max_tokens=TOKENS):
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def outcomes(rounds, k):
    for round_ in rounds[:-1]:  # the last one may be cut short
        if round_.num_draft_tokens:
            kept = round_.num_accepted_tokens
            yield "full" if kept == round_.num_draft_tokens else "first" if kept == 0 else "partial"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_strict_equals_generate(pair, prompts, kind):
    target, draft = pair
    seen = Counter()
    for prompt in prompts:
        expected = generate(target, prompt)
        assert len(set(expected)) > 5
        for k in (0, 1, 4, 15):
            drafter = make_drafter(kind, cached(draft)) if k else None
            result = run(CachedModel(target), drafter, prompt, k=k, max_tokens=TOKENS)
            assert result.ids == expected, (kind, k)
            assert result.stats.mean_acceptance_length <= k + 1
            seen.update(outcomes(result.rounds, k))
            if k:
                drafter.close()
    assert min(seen["full"], seen["partial"], seen["first"]) >= 5, seen


@pytest.mark.parametrize("kind", DRAFTERS)
def test_fly_takes_every_path_and_reports_what_it_changed(pair, prompts, kind):
    """Relaxation, window failure and gate rejection all happen, and every unmarked token is the target's own choice."""
    target, draft = pair
    relaxed, reasons, texts = 0, Counter(), 0
    for prompt in prompts:
        for window, k in ((1, 4), (2, 15), (6, 15)):
            drafter = make_drafter(kind, cached(draft))
            rule = Rule(theta=0.3, window=window)
            result = run(CachedModel(target), drafter, prompt, k=k, max_tokens=TOKENS, rule=rule)
            with torch.inference_mode():
                logits = target(torch.tensor([[*prompt, *result.ids]]), use_cache=False).logits[0]
            own = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            changed = [i for i, (a, b) in enumerate(zip(own, result.ids, strict=True)) if a != b]
            assert changed == result.relaxed
            assert [own[i] for i in result.relaxed] == result.overruled
            assert result.stats.num_relaxed_tokens == len(result.relaxed)
            relaxed += len(result.relaxed)
            reasons.update(round_.rejection for round_ in result.rounds)
            texts += result.ids != generate(target, prompt)
    assert reasons["window"] >= 10 and reasons[None] >= 10
    if kind != "lookup":
        assert relaxed >= 10 and texts >= 3


def test_the_gate_rejects_what_is_certain(pair, prompts):
    target, draft = pair
    low = run(CachedModel(target), make_drafter("model", cached(draft)), prompts[0], k=15, rule=Rule(0.0, 1))
    high = run(CachedModel(target), make_drafter("model", cached(draft)), prompts[0], k=15, rule=Rule(1.0986, 1))
    assert low.stats.num_gate_rejections == 0 and low.stats.num_relaxed_tokens > 0
    assert high.stats.num_gate_rejections > 0 and high.stats.num_relaxed_tokens == 0


def test_infinite_theta_is_strict_bit_for_bit(pair, prompts):
    target, draft = pair
    strict, loose = (
        run(CachedModel(target), make_drafter("nested", cached(draft)), prompts[1], k=15, rule=rule)
        for rule in (Rule(), Rule(theta=float("inf"), window=2))
    )
    assert [r.token_ids for r in strict.rounds] == [r.token_ids for r in loose.rounds]
    assert loose.stats.num_relaxed_tokens == 0


def test_normalized_entropy_is_its_own_scale(pair, prompts):
    target, draft = pair
    rounds = {}
    for entropy in ("top3", "normalized"):
        result = run(
            CachedModel(target), make_drafter("model", cached(draft)), prompts[0], k=15, rule=Rule(0.45, 1, entropy)
        )
        rounds[entropy] = result.stats.num_relaxed_tokens
    assert rounds["normalized"] < rounds["top3"]


def test_nested_drafting_proposes_the_same_with_fewer_forwards(pair, prompts):
    target, draft = pair
    alone = run(CachedModel(target), ModelDrafter(CachedModel(draft)), prompts[0], k=15, max_tokens=80)
    nested = run(
        CachedModel(target), ModelDrafter(CachedModel(draft), LookupDrafter()), prompts[0], k=15, max_tokens=80
    )
    assert [r.token_ids for r in alone.rounds] == [r.token_ids for r in nested.rounds]
    assert nested.stats.num_draft_forwards < alone.stats.num_draft_forwards


def test_long_prompts_are_prefilled_in_chunks(pair, prompts):
    target, draft = pair
    prompt = prompts[2] * 4
    expected = generate(target, prompt, 20)
    for chunk in (1, 7, 512):
        drafter = ModelDrafter(CachedModel(draft), LookupDrafter(), prefill_chunk=chunk)
        result = run(CachedModel(target), drafter, prompt, k=4, max_tokens=20, prefill_chunk=chunk)
        assert result.ids == expected
        pieces = -(-(len(prompt) - 1) // chunk) if result.target.resumes else 1
        assert result.stats.num_target_forwards == result.stats.num_rounds + pieces


def test_a_prompt_of_one_token(pair):
    target, draft = pair
    result = run(CachedModel(target), make_drafter("nested", cached(draft)), [7], k=4)
    assert result.ids == generate(target, [7], 40)


def test_at_most_one_host_copy_per_forward(pair, prompts):
    target, draft = pair
    result = run(CachedModel(target), make_drafter("nested", cached(draft)), prompts[0], k=15, rule=Rule(0.3, 2))
    assert 0 < result.stats.num_host_copies <= result.stats.num_rounds + result.stats.num_draft_forwards
