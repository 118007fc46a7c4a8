"""Prefix reuse: the same answers as without it, within its bound, and nothing of one conversation in another."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tiny_models import (
    _build,
    _shape,
    noisy_copy,
    random_prompts,
    tiny_gemma3,
    tiny_lfm2,
    tiny_llama,
    tiny_mistral,
    tiny_tokenizer,
)
from transformers import Phi3Config, Phi3ForCausalLM

from fly_llm import FLyEngine
from fly_llm.models.cached_model import CachedModel, Past
from fly_llm.models.prefixes import PrefixStore

MAKERS = {"llama": tiny_llama, "mistral-sliding": tiny_mistral, "gemma3-mixed": tiny_gemma3, "lfm2-conv": tiny_lfm2}
FORGETFUL = ("mistral-sliding", "gemma3-mixed", "lfm2-conv")
"""Models whose caches cannot be truncated far."""
EXTRA = [random_prompts(1, 9, seed=50 + turn)[0] for turn in range(4)]


@pytest.fixture(scope="module", params=MAKERS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind):
    target = MAKERS[kind]()
    with FLyEngine.from_pretrained(target, noisy_copy(target), tokenizer=tiny_tokenizer(), max_tokens=24) as engine:
        yield engine


def store(engine):
    """The kept caches, once the last request has put its own there, which it does after its answer is out."""
    done = threading.Event()
    engine._handle.models.submit(done.set)
    assert done.wait(10)
    return engine._handle.models.pair().prefixes


def forget(engine):
    store(engine)._entries.clear()


SETTINGS = [
    {"num_speculative_tokens": 0},
    {"drafting": "lookup", "lossless": True},
    {"drafting": "model", "lossless": True, "num_speculative_tokens": 4},
    {"drafting": "nested", "lossless": True},
    {"drafting": "nested", "window": 2},
    {"drafting": "model", "temperature": 0.8, "seed": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_conversation_gives_the_same_tokens_with_and_without(engine, kind, settings):
    forget(engine)
    shares = []
    for opening in random_prompts(3, 30, seed=7):
        prompt = list(opening)
        for extra in EXTRA:
            fresh = engine.generate(prompt, prefix_cache_bytes=0, **settings)
            again = engine.generate(prompt, **settings)
            assert again.token_ids == fresh.token_ids
            assert again.relaxed == fresh.relaxed
            assert (fresh.usage.cached_tokens, fresh.stats.num_cached_tokens) == (0, 0)
            assert again.usage.cached_tokens == again.stats.num_cached_tokens < len(prompt)
            shares.append(again.usage.cached_tokens / len(prompt))
            prompt = [*prompt, *again.token_ids, *extra]
    if kind == "lfm2-conv" and settings == {"num_speculative_tokens": 0}:  # starts over where its past is not recorded
        assert set(shares) == {0}
        return
    assert [share > 0 for share in shares] == [False, True, True, True] * 3
    assert min(share for share in shares if share) > 0.6


def test_only_what_is_new_is_computed(engine):
    forget(engine)
    first = engine.generate(random_prompts(1, 60)[0], num_speculative_tokens=4)
    prompt = [*random_prompts(1, 60)[0], *first.token_ids, *EXTRA[0]]
    second = engine.generate(prompt, num_speculative_tokens=4)
    assert second.usage.cached_tokens == 60 + len(first.token_ids) - 1  # its last token was still pending
    # one forward for what is new, the others verify
    assert second.stats.num_target_forwards == second.stats.num_rounds + 1


def test_the_same_prompt_again_leaves_its_last_token_pending(engine, kind):
    forget(engine)
    prompt = random_prompts(1, 40, seed=5)[0]
    first = engine.generate(prompt, max_tokens=4)
    again = engine.generate(prompt, max_tokens=4)
    assert again.token_ids == first.token_ids
    # what a sliding window or a convolution has forgotten is computed again
    assert again.usage.cached_tokens == (0 if kind in FORGETFUL else 39)


def test_conversations_that_share_a_beginning_keep_apart(engine, kind):
    forget(engine)
    opening = random_prompts(1, 80, seed=11)[0]
    prompts = [[*opening, *random_prompts(1, 70, seed=20 + i)[0]] for i in range(3)]
    fresh = [engine.generate(prompt, prefix_cache_bytes=0).token_ids for prompt in prompts]
    for prompt, expected in zip(prompts, fresh, strict=True):
        assert engine.generate(prompt).token_ids == expected
    turns = [[*prompt, *answer, *EXTRA[0]] for prompt, answer in zip(prompts, fresh, strict=True)]
    for turn in turns:  # each goes on from its own cache, not from the opening alone
        result = engine.generate(turn)
        assert result.token_ids == engine.generate(turn, prefix_cache_bytes=0).token_ids
        assert result.usage.cached_tokens == len(turn) - len(EXTRA[0]) - 1
    if kind not in FORGETFUL:
        assert engine.generate([*opening, *EXTRA[1]]).usage.cached_tokens == 80


def test_the_bound_holds_over_twenty_conversations(engine):
    forget(engine)
    one = engine.generate(random_prompts(1, 100)[0])
    size = store(engine).nbytes
    assert size > 0
    assert len(store(engine)) == 2  # target and draft
    limit = 5 * size
    for i in range(20):
        engine.generate(random_prompts(1, 100, seed=i)[0], prefix_cache_bytes=limit)
        held = sum(entry.past.nbytes for entry in store(engine)._entries)
        assert held == store(engine).nbytes <= limit
    assert len(store(engine)) >= 8
    assert one.usage.cached_tokens == 0


def test_the_least_recently_used_goes_first(kind):
    if kind != "llama":
        pytest.skip("one model is enough")
    target = tiny_llama()
    pasts = PrefixStore()
    prompts = random_prompts(3, 40)
    for prompt in prompts[:2]:
        pasts.put("target", prompt, past(target, prompt), prompt_length=40, limit=10**9)
    size = pasts.nbytes // 2
    assert pasts.take("target", [*prompts[0], 5])[1] == 40  # handed over, and put back: now the newer one
    pasts.put("target", prompts[0], past(target, prompts[0]), prompt_length=40, limit=10**9)
    pasts.put("target", prompts[2], past(target, prompts[2]), prompt_length=40, limit=2 * size)
    assert [entry.ids for entry in pasts._entries] == [tuple(prompts[0]), tuple(prompts[2])]
    pasts.put("target", prompts[1], past(target, prompts[1]), prompt_length=40, limit=size - 1)
    assert len(pasts) == 0


def past(model, ids) -> Past:
    cache = CachedModel(model)
    cache.advance(ids, num_logits=1)
    return cache.detach()


def test_a_copy_shares_no_memory_and_holds_no_more_than_asked(kind):
    target = MAKERS[kind]()
    ids = random_prompts(1, 40)[0]
    whole = past(target, ids)
    copied = whole.copy(40 if kind in FORGETFUL else 20)
    assert kind in FORGETFUL or copied.nbytes == whole.nbytes // 2
    other, original = CachedModel(target), CachedModel(target)
    other.attach(copied, copied.length)
    other.advance(ids[:5], num_logits=1)
    original.attach(whole, 40)
    expected = CachedModel(target)
    expected.advance(ids, num_logits=1)
    assert torch.allclose(original.advance([7], 1), expected.advance([7], 1), atol=1e-4)


def test_caches_of_the_two_models_and_of_plain_decoding_are_not_mixed_up():
    target = tiny_llama()
    pasts = PrefixStore()
    ids = random_prompts(1, 40)[0]
    pasts.put(("target", True), ids, past(target, ids), prompt_length=40, limit=10**9)
    assert pasts.take(("draft", True), [*ids, 1]) is None
    assert pasts.take(("target", False), [*ids, 1]) is None
    assert pasts.take(("target", True), ids[:10]) is None  # too little to be worth it
    assert pasts.take(("target", True), [*ids, 1])[1] == 40
    assert pasts.take(("target", True), [*ids, 1]) is None  # it was handed over


def test_a_cancelled_request_leaves_what_it_had_read(engine):
    forget(engine)
    prompt = random_prompts(1, 60)[0]
    with engine.stream(prompt, num_speculative_tokens=2, max_tokens=200) as events:
        first = next(events)
    result = engine.generate([*prompt, *first.token_ids[:-1], 9, 9], num_speculative_tokens=2)
    fresh = engine.generate([*prompt, *first.token_ids[:-1], 9, 9], num_speculative_tokens=2, prefix_cache_bytes=0)
    assert result.token_ids == fresh.token_ids


def test_a_failed_forward_leaves_nothing(engine, monkeypatch):
    forget(engine)
    prompt = random_prompts(1, 60)[0]
    advance = CachedModel.advance

    def fails(self, tokens, num_logits):
        logits = advance(self, tokens, num_logits)
        if self.length > 70:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(CachedModel, "advance", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(prompt)
    assert len(store(engine)) == 0


def test_a_cache_that_is_too_large_takes_no_other_with_it():
    target, pasts = tiny_llama(), PrefixStore()
    one, long = random_prompts(1, 40)[0], random_prompts(1, 200, seed=3)[0]
    pasts.put("target", one, past(target, one), prompt_length=40, limit=10**9)
    size = pasts.nbytes
    pasts.put("target", long, past(target, long), prompt_length=200, limit=2 * size)
    assert [entry.ids for entry in pasts._entries] == [tuple(one)]
    pasts.trim(size - 1)
    assert len(pasts) == 0


def test_a_live_model_that_was_trained_is_computed_afresh():
    target = tiny_llama()
    with FLyEngine.from_pretrained(target, tokenizer=tiny_tokenizer(), max_tokens=12) as engine:
        prompt = random_prompts(1, 60)[0]
        engine.generate(prompt)
        assert engine.generate(prompt).usage.cached_tokens == 59
        with torch.no_grad():
            for weight in target.parameters():
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        again = engine.generate(prompt)
        assert again.usage.cached_tokens == 0
        assert again.token_ids == engine.generate(prompt, prefix_cache_bytes=0).token_ids


def test_positions_that_are_encoded_otherwise_above_a_length_are_read_again():
    """longrope (Phi-3, Phi-4-mini): above its original length all keys change, those in the cache too."""
    shape = {name: value for name, value in _shape(320, None, 2).items() if name != "head_dim"}
    config = Phi3Config(
        **{**shape, "max_position_embeddings": 512},
        original_max_position_embeddings=40,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 6.0],
        },
    )
    model = _build(Phi3ForCausalLM, config, 3, 7.0)
    assert CachedModel(model).switch == 40
    with FLyEngine.from_pretrained(
        model, noisy_copy(model), tokenizer=tiny_tokenizer(), lossless=True, max_tokens=16
    ) as engine:
        crossed = 0
        for seed, length in enumerate((20, 30, 38, 39, 40, 41, 42, 60)):
            prompt = random_prompts(1, length, seed=seed)[0]
            for turn in range(2):
                expected, ids = [], list(prompt)
                for _ in range(16):  # no cache at all
                    with torch.inference_mode():
                        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                    expected.append(ids[-1])
                crossed += len(prompt) <= 40 < len(ids)
                for k in (0, 5):
                    got = engine.generate(prompt, num_speculative_tokens=k)
                    assert list(got.token_ids) == expected, (length, turn, k)
                prompt = [*ids, *EXTRA[turn]]
        assert crossed >= 4


def test_closing_the_engine_frees_the_caches():
    engine = FLyEngine.from_pretrained(tiny_llama(), tokenizer=tiny_tokenizer(), max_tokens=4)
    engine.generate(random_prompts(1, 60)[0])
    models = engine._handle.models
    assert len(store(engine)) == 1
    engine.close()
    deadline = time.monotonic() + 10
    while models.is_loaded and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not models.is_loaded
