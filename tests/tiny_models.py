"""Tiny random models and a tiny tokenizer for the whole suite: float32, seeded, milliseconds per forward.

An untrained model is close to uniform, which tests nothing: every greedy choice is a near-tie and every position is
equally uncertain. These have large weights and a sharpened, untied output layer, so that a greedy continuation depends
on its context and goes through certain and uncertain positions alike. `tests/models/test_loading.py` asserts the
properties the suite relies on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 320
SHARPNESS = 7.0
"""Standard deviation of the logits at a position, roughly: 3 is uncertain nearly everywhere, 15 nearly nowhere."""
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 3 of `tiny_tokenizer`."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog and the fox sleep in the sun",
    "she said that there is nothing in the world that they would rather have than another sunny day",
    "for index in range(10):\n    print(index)\n    return index + 1",
    "numbers 10 20 30 and 100, names and other words; this and that, here and there, now and then",
)


def _shape(vocab_size: int, eos_token_id: int | list[int] | None, num_hidden_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
    }


def _build(make: Any, config: Any, seed: int, sharpness: float) -> Any:
    """Build a model whose every random number comes from `seed`, leaving the global generator alone.

    Args:
        make: a model class.
        config: its config.
        seed: seeds the weights.
        sharpness: standard deviation of the logits at a position, roughly.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                continue
            fan_in = parameter.shape[-1] ** 0.5
            gain = 0.3 if "bias" in name else 1.0 if "embed" in name else 1.0 / fan_in
            if "lm_head" in name:
                gain = sharpness / fan_in
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)
    return model.eval()


def tiny_llama(
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    eos_token_id: int | list[int] | None = None,
    sharpness: float = SHARPNESS,
) -> LlamaForCausalLM:
    """A two-layer Llama: full attention."""
    config = LlamaConfig(**_shape(vocab_size, eos_token_id, 2))
    return _build(LlamaForCausalLM, config, seed, sharpness)


def tiny_qwen2(
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    eos_token_id: int | list[int] | None = None,
    sharpness: float = SHARPNESS,
) -> Qwen2ForCausalLM:
    """A two-layer Qwen2: full attention, biased projections."""
    config = Qwen2Config(**_shape(vocab_size, eos_token_id, 2))
    return _build(Qwen2ForCausalLM, config, seed, sharpness)


def tiny_mistral(
    vocab_size: int = VOCAB_SIZE,
    *,
    sliding_window: int | None = 8,
    seed: int = 0,
    eos_token_id: int | list[int] | None = None,
    sharpness: float = SHARPNESS,
) -> MistralForCausalLM:
    """A two-layer Mistral: every layer sees the last `sliding_window` tokens only."""
    config = MistralConfig(**_shape(vocab_size, eos_token_id, 2), sliding_window=sliding_window)
    return _build(MistralForCausalLM, config, seed, sharpness)


def tiny_gemma3(
    vocab_size: int = VOCAB_SIZE,
    *,
    sliding_window: int = 8,
    seed: int = 0,
    eos_token_id: int | list[int] | None = None,
    sharpness: float = SHARPNESS,
) -> Gemma3ForCausalLM:
    """A four-layer Gemma 3: sliding and full attention take turns."""
    config = Gemma3TextConfig(
        **_shape(vocab_size, eos_token_id, 4),
        sliding_window=sliding_window,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return _build(Gemma3ForCausalLM, config, seed, sharpness)


def tiny_lfm2(
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    eos_token_id: int | list[int] | None = None,
    sharpness: float = SHARPNESS,
) -> Lfm2ForCausalLM:
    """A four-layer LFM2: short convolutions and full attention take turns."""
    config = Lfm2Config(
        **_shape(vocab_size, eos_token_id, 4),
        conv_L_cache=3,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    )
    return _build(Lfm2ForCausalLM, config, seed, sharpness)


def noisy_copy(model: Any, scale: float = 0.07, seed: int = 1) -> Any:
    """A deep copy with gaussian noise of `scale` times each weight matrix' standard deviation: a plausible draft model.

    With the default scale it agrees with the original on 60 to 85 % of greedy steps.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (parameter.std() * scale))
    return draft.eval()


def greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The slow, obvious greedy continuation: no cache, one full forward per token, end-of-sequence ignored."""
    return greedy_all(model, [prompt], max_tokens)[0]


def greedy_all(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """`greedy` for several prompts of one length, side by side."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids[:, len(prompts[0]) :].tolist()


def answer_logits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> torch.Tensor:
    """[prompts, answer length, vocab]: the logits from which each token of the answers would be chosen."""
    ids = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    with torch.inference_mode():
        return model(ids, use_cache=False).logits[:, len(prompts[0]) - 1 : -1]


def agreement(
    model: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int = 40
) -> float:
    """Share of the target's greedy steps at which the draft model, given the same prefix, picks the same token."""
    answers = greedy_all(model, prompts, max_tokens)
    picks = answer_logits(draft, prompts, answers).argmax(-1)
    return (picks == torch.tensor(answers)).float().mean().item()


def random_prompts(count: int = 8, length: int = 12, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[list[int]]:
    """Seeded random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    low = len(SPECIAL_TOKENS)
    return torch.randint(low, vocab_size, (count, length), generator=generator).tolist()


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text is encodable, and `len(tokenizer) == vocab_size`.

    Ids 0 to 3 are `SPECIAL_TOKENS`, then 256 bytes, then merges. It adds no token of its own to a text.

    Raises:
        ValueError: `vocab_size` is below 260 or more than the built-in text has merges for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size must be 260 to {tokenizer.get_vocab_size()}, got {vocab_size}")
    bos, eos, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=[start, end],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
