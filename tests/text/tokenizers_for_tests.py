"""Small tokenizers of the two families that matter for text: byte-level BPE, and SentencePiece with byte tokens."""

from __future__ import annotations

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "the quick brown fox jumps over the lazy dog, and then the dog and the fox sleep in the sun",
    "system user assistant: you are helpful. Say hello to the user; the user says hello to you",
    "größer über façade naïve señor čeština привет мир это текст на русском языке",
    "中文的文字和日本語の文章です 한국어 문장입니다 नमस्ते दुनिया สวัสดีชาวโลก",
    "smile 😀 wave 👋🏽 family 👨‍👩‍👧 flag 🇫🇷 heart ❤️ rocket 🚀🚀",
)
CONTROL = ("<|im_start|>", "<|im_end|>")


@functools.cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


@functools.cache
def _sentencepiece_json() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=240, limit_alphabet=60, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    # "�" and "▁▁" as ordinary tokens: text that looks like bytes gone wrong, and spaces that a decoder strips.
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + ["�", "▁▁", "▁�"]:
        vocab.setdefault(token, len(vocab))
    state["model"]["byte_fallback"] = True
    return json.dumps(state)


def _wrapped(tokenizer: Tokenizer, *, control_is_special: bool, adds: str, chat_template: str | None):
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken(token, special=control_is_special, normalized=False) for token in CONTROL])
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    single = {"": "$A", "bos": "<s> $A", "bos+eos": "<s> $A </s>"}[adds]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = chat_template
    return wrapped


def byte_level(*, control_is_special: bool = True, adds: str = "", chat_template: str | None = None):
    """Like GPT-2, Llama 3 and Qwen. `adds`: what plain encoding puts around the text, "", "bos" or "bos+eos"."""
    tokenizer = Tokenizer.from_str(_byte_level_json())
    return _wrapped(tokenizer, control_is_special=control_is_special, adds=adds, chat_template=chat_template)


def sentencepiece(
    *, strip: int = 1, control_is_special: bool = True, adds: str = "bos", chat_template: str | None = None
):
    """Like Llama 2 and Mistral (`strip`) or Gemma (not): spaces are "▁", and rare characters are byte tokens."""
    tokenizer = Tokenizer.from_str(_sentencepiece_json())
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    return _wrapped(tokenizer, control_is_special=control_is_special, adds=adds, chat_template=chat_template)


def metaspace():
    """A decoder that drops every space in front of the first token, and knows no bytes."""
    tokenizer = Tokenizer.from_str(_sentencepiece_json())
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _wrapped(tokenizer, control_is_special=True, adds="", chat_template=None)
