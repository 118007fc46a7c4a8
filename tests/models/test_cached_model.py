"""The cache wrapper against full forwards: truncating, sliding windows, what cannot be rolled back."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from running import make_drafter, run
from tiny_models import random_prompts, tiny_gemma3, tiny_lfm2, tiny_llama, tiny_mistral, tiny_qwen2
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from fly_llm.config import SamplingConfig
from fly_llm.decoding.decode import decode
from fly_llm.decoding.sampling import Sampler
from fly_llm.errors import UnsupportedCacheError
from fly_llm.models.cached_model import CachedModel

MAKERS = [tiny_llama, tiny_qwen2, tiny_mistral, tiny_gemma3, tiny_lfm2]


def full(model, ids, count):
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -count:]


@pytest.mark.parametrize("make", MAKERS)
def test_logits_equal_full_forwards_under_random_rollbacks(make):
    """Advance, truncate and settle in random order, around and past the sliding window of 8."""
    model = make()
    choices = random.Random(4)
    for trial in range(8):
        cached, ids = CachedModel(model), []
        for _ in range(25):
            new = [choices.randrange(4, 320) for _ in range(choices.randrange(1, 7))]
            logits = cached.advance(new, num_logits=len(new))
            ids += new
            assert torch.allclose(logits, full(model, ids, len(new)), atol=2e-4), trial
            if choices.random() < 0.6:
                length = choices.randrange(cached.shortest_restorable, len(ids) + 1)
                cached.truncate(length)
                del ids[length:]
            if choices.random() < 0.5:
                cached.settle()
            assert cached.length == len(ids)


def test_a_sliding_window_cache_knows_its_shortest_restorable_length():
    cached = CachedModel(tiny_mistral(sliding_window=8))
    prompt = random_prompts(1, 20)[0]
    cached.advance(prompt[:5], 1)
    cached.settle()
    assert cached.shortest_restorable == 0
    cached.advance(prompt[5:], 1)
    assert cached.shortest_restorable == 0  # recorded until settled
    cached.settle()
    assert cached.shortest_restorable == 20
    cached.advance([5, 6, 7, 8], 1)
    cached.truncate(20)
    with pytest.raises(UnsupportedCacheError, match="truncated to 20 or more, not to 14"):
        cached.truncate(14)
    assert CachedModel(tiny_llama()).shortest_restorable == 0


def test_a_full_attention_cache_restores_any_length():
    model = tiny_llama()
    cached = CachedModel(model)
    prompt = random_prompts(1, 20)[0]
    cached.advance(prompt, 1)
    cached.settle()
    cached.truncate(3)
    assert torch.allclose(cached.advance(prompt[3:9], 1), full(model, prompt[:9], 1), atol=1e-4)
    cached.truncate(0)
    assert torch.allclose(cached.advance(prompt[:4], 1), full(model, prompt[:4], 1), atol=1e-4)


def test_truncating_to_more_than_there_is_is_an_error():
    cached = CachedModel(tiny_llama())
    cached.advance([5, 6, 7], 1)
    with pytest.raises(ValueError, match="3 tokens to 4"):
        cached.truncate(4)


def test_settling_bounds_the_memory_of_sliding_layers():
    cached = CachedModel(tiny_mistral(sliding_window=8))
    for _, prompt in itertools.product(range(4), random_prompts(4, 20)):
        cached.advance(prompt, 1)
        cached.settle()
    assert {layer.keys.shape[-2] for layer in cached._cache.layers} == {7}
    assert cached.length == 320


def test_decoding_bounds_the_memory_of_sliding_layers():
    """Prefill and every round give up what has rolled out of the window."""
    target = CachedModel(tiny_mistral(sliding_window=8))
    sizes = []
    drafter = make_drafter("lookup", None)
    prompt = random_prompts(1, 40)[0]

    def watch():
        if target._cache is not None:
            sizes.append(max(layer.keys.shape[-2] for layer in target._cache.layers if layer.is_initialized))
        return False

    run(target, drafter, prompt, k=4, max_tokens=40, prefill_chunk=10, cancelled=watch)
    assert len(sizes) > 20
    assert max(sizes) <= 7 + 5


def test_reset_releases_everything():
    cached = CachedModel(tiny_llama())
    cached.advance([5, 6, 7], 1)
    cached.reset()
    assert (cached.length, cached._cache) == (0, None)
    assert cached.num_forwards == 1  # counts the request's, whatever becomes of the cache


def test_a_wider_draft_vocabulary_is_sliced():
    cached = CachedModel(tiny_llama(), vocab_size=300)
    assert cached.vocab_size == 300
    assert cached.advance([5, 6, 7], 2).shape == (2, 300)


RECURRENT = {
    "falcon_mamba": (FalconMambaForCausalLM, FalconMambaConfig, {"state_size": 4}),
    "bamba": (
        BambaForCausalLM,
        BambaConfig,
        {
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
        },
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_plain_decoding_of_recurrent_models_equals_generate_at_any_prompt_length(name):
    """They start over when several tokens follow cached ones, so their prompt is prefilled in one piece."""
    make, make_config, options = RECURRENT[name]
    config = make_config(vocab_size=320, hidden_size=32, num_hidden_layers=2, pad_token_id=0, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(60)
    for prompt in random_prompts(2, 33):
        result = run(CachedModel(model, rollback=False), None, prompt, k=0, max_tokens=12, prefill_chunk=8)
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert result.ids == expected[0, 33:].tolist()[: len(result.ids)]
        assert len(result.ids) == 12


def tiny_mamba():
    config = MambaConfig(vocab_size=320, hidden_size=32, state_size=4, num_hidden_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MambaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_a_cache_that_cannot_be_rolled_back_is_refused_before_anything_is_generated(kind):
    model, prompt = tiny_mamba(), random_prompts(1, 12)[0]
    target, draft = (model, tiny_llama()) if kind == "lookup" else (tiny_llama(), model)
    with pytest.raises(
        UnsupportedCacheError, match=r"MambaForCausalLM.*cannot be rolled back.*num_speculative_tokens=0"
    ):
        run(CachedModel(target), make_drafter(kind, lambda: CachedModel(draft)), prompt, k=4)


def test_a_prompt_of_one_token_is_refused_before_anything_is_generated_too():
    rounds = []
    with pytest.raises(UnsupportedCacheError, match="cannot be rolled back"):
        rounds.extend(
            decode(
                CachedModel(tiny_mamba()),
                make_drafter("lookup", None),
                [7],
                sampler=Sampler(SamplingConfig(), 0, 320),
                max_tokens=4,
                num_speculative_tokens=4,
            )
        )
    assert rounds == []


def test_plain_decoding_works_on_a_cache_that_cannot_be_rolled_back():
    model, prompt = tiny_mamba(), random_prompts(1, 12)[0]
    result = run(CachedModel(model, rollback=False), None, prompt, k=0, max_tokens=12)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert result.ids == expected[0, 12:].tolist()


def test_a_model_that_ignores_the_cache_is_refused():
    """RWKV keeps a state of its own: going on from our cache would silently forget the prompt."""
    config = RwkvConfig(vocab_size=320, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    model, prompt = RwkvForCausalLM(config).eval(), random_prompts(1, 12)[0]
    with pytest.raises(UnsupportedCacheError, match="RwkvForCausalLM does not keep its past in transformers' cache"):
        run(CachedModel(model, rollback=False), None, prompt, k=0, max_tokens=4)
