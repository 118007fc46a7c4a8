"""What a checkpoint says about itself, and whether two of them fit together.

Nothing here loads weights: the functions read configs, generation configs and tokenizers that are already there.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from fly_llm.config import SAMPLING_FIELDS
from fly_llm.errors import ModelLoadError, TokenizerMismatchError

logger = logging.getLogger("fly_llm")

_logged: set[str] = set()

PENALTIES: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "forced_decoder_ids": (),
    "sequence_bias": (),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "constraints": (),
    "stop_strings": (),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
}
"""Settings that change even a greedy answer, with the values that do nothing (None never does)."""

SAMPLING: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (1.0,),
    "top_k": (0, 50),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}
"""Settings that change how a token is sampled, likewise. 50 is the default `top_k` of a generation config."""

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
_SANE_LENGTH = 10**9
_PLACEHOLDER = re.compile(r"\[PAD(\d+)\]")
_CAUSAL = re.compile(r"ForCausalLM|LMHead|ForConditionalGeneration")

PROBE = (
    "The quick brown fox and the other fox can't jump over 12,345.67 lazy dogs. Größe, naïve café, l'été; "
    "Привет, мир! 你好,世界。"
    "こんにちは 안녕하세요 مرحبا नमस्ते 😀👍🏽\n\n  def f(x: int) -> list[str]:\n\treturn [str(i) for i in range(x)]\r\n"
    "  # https://example.org/a?b=c&d=%20 ... --- !!! ½ ﬁ A\u0301 1234567890 HelloWorld snake_case don't I'LL\n"
)


def check_tokenizers(
    target_tokenizer: Any,
    draft_tokenizer: Any,
    *,
    target_name: str,
    draft_name: str,
    sizes: tuple[int | None, int | None] = (None, None),
) -> None:
    """Make sure that a token id means the same text to both models.

    The vocabularies are compared token by token, added tokens included. The sizes of the models' embedding matrices
    play no part (they are padded differently within one family), and neither do the placeholders `[PAD<id>]` with which
    a GGUF file spells such padding. A probe text is then encoded with both, because equal vocabularies can still be
    used with different merges, normalisers or splits.

    Args:
        target_tokenizer: the target's.
        draft_tokenizer: the draft model's.
        target_name: for the error.
        draft_name: for the error.
        sizes: widths of the two models' logits, where they are known: a token that its own model does not have (one
            that a GGUF tokenizer is given on top) plays no part.

    Raises:
        TokenizerMismatchError: names the first difference, and what to do.
    """
    ours, theirs = (
        {i: token for i, token in _tokens_by_id(tokenizer).items() if size is None or i < size}
        for tokenizer, size in zip((target_tokenizer, draft_tokenizer), sizes, strict=True)
    )
    if ours != theirs:
        first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        what = f"id {first} is {_quote(first, theirs)} in its vocabulary and {_quote(first, ours)} in the target's"
        raise _mismatch(target_name, draft_name, what)
    wanted, got = _encode(target_tokenizer), _encode(draft_tokenizer)
    if wanted != got:
        size = min(len(wanted), len(got))
        at = next((i for i in range(size) if wanted[i] != got[i]), size)
        mine, its = (ids[at] if at < len(ids) else -1 for ids in (wanted, got))
        what = (
            f"the vocabularies are equal, but it splits text differently: token {at} of a probe is "
            f"{_quote(its, theirs)} (id {its}) to it and {_quote(mine, ours)} (id {mine}) to the target"
        )
        raise _mismatch(target_name, draft_name, what)


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items() if not _is_placeholder(token, i)}


def _is_placeholder(token: str, token_id: int) -> bool:
    if not token.startswith("[PAD"):
        return False
    match = _PLACEHOLDER.fullmatch(token)
    return match is not None and int(match[1]) == token_id


def _encode(tokenizer: Any) -> list[int]:
    return list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def _quote(token_id: int, tokens: dict[int, str]) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "absent"


def _mismatch(target_name: str, draft_name: str, what: str) -> TokenizerMismatchError:
    return TokenizerMismatchError(
        f"draft model {draft_name!r} does not share the tokenizer of target {target_name!r}: {what}. Its proposals "
        "would be other words to the target. Choose a draft model of the target's family (for example "
        "Qwen2.5-0.5B-Instruct for Qwen2.5-7B-Instruct), or none (draft_model=None, or draft=None) to draft by prompt "
        "lookup"
    )


def require_causal_lm(config: Any, name: str) -> None:
    """Refuse a model that does not write text from left to right.

    Raises:
        ModelLoadError: the config describes an encoder-decoder or an encoder.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    advice = "use a decoder-only language model such as Llama, Qwen, Mistral, Gemma or SmolLM"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{name!r} is an encoder-decoder model ({kind}), and only causal ones can be decoded: {advice}"
        )
    from transformers.models.auto import modeling_auto as auto

    architectures = getattr(config, "architectures", None) or []
    causal = any(_CAUSAL.search(architecture) for architecture in architectures)
    encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if encoder and not causal:
        raise ModelLoadError(
            f"{name!r} is an encoder ({', '.join(architectures) or kind}), which reads text only: {advice}"
        )


def ignored_generation_settings(generation_config: Any) -> dict[str, Any]:
    """The settings of a checkpoint's generation config that would change its answers, and are not inherited.

    Some checkpoints ship a repetition penalty or a temperature. Inheriting them silently would make the same request
    answer differently from engine to engine, so a request says itself what it wants.

    Args:
        generation_config: a transformers `GenerationConfig`, or None.

    Returns:
        name -> value of every setting that differs from doing nothing, penalties first.
    """
    found: dict[str, Any] = {}
    for name, neutral in (PENALTIES | SAMPLING).items():
        value = getattr(generation_config, name, None)
        if value is not None and value not in neutral:
            found[name] = value
    return found


def log_ignored_settings(name: str, generation_config: Any) -> None:
    """Say once per model which settings are not inherited: penalties as a warning, sampling as information."""
    ignored = ignored_generation_settings(generation_config)
    for level, names in ((logging.WARNING, PENALTIES), (logging.INFO, SAMPLING)):
        found = {key: f"{key}={value!r}" for key, value in ignored.items() if key in names}
        settable = ", ".join(text for key, text in found.items() if key in SAMPLING_FIELDS)
        message = f"{name}: not inherited from its generation config: {', '.join(found.values())}"
        if settable:
            message += f"; to have them, set them on the engine or the request: {settable}"
        if found and message not in _logged:
            _logged.add(message)
            logger.log(level, message)


def eos_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: of the model's config, its generation config and the tokenizer together."""
    found: set[int] = set()
    for owner in (model_config, text_config(model_config), generation_config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        for token in value if isinstance(value, list | tuple | set) else [value]:
            if token is not None and int(token) >= 0:
                found.add(int(token))
    return frozenset(found)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Special and added tokens: the ids that are never relaxed."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def context_window(model_config: Any, tokenizer: Any = None) -> int | None:
    """The most tokens the model can hold, or None if nothing says so. Rope scaling is already in the config's value."""
    config = text_config(model_config)
    named = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    lengths = [
        next((n for n in named if isinstance(n, int) and n > 0), None),
        getattr(tokenizer, "model_max_length", None),
    ]
    sane = [int(length) for length in lengths if length is not None and 0 < length < _SANE_LENGTH]
    return min(sane, default=None)


def sliding_window(model_config: Any) -> int | None:
    """The window of the layers that forget, or None if every layer sees the whole context."""
    config = text_config(model_config)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not isinstance(window, int) or (kinds and "sliding_attention" not in kinds):
        return None
    return window


def text_config(model_config: Any) -> Any:
    """The part of a config that describes the language model; the config itself for a text-only model."""
    get = getattr(model_config, "get_text_config", None)
    return get(decoder=True) if get is not None else model_config
