"""A tiny random Llama with a byte-level tokenizer, and a way to watch it and to say what it answers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

WINDOW = 512
"""Context window: `max_position_embeddings` of the model and `model_max_length` of the tokenizer."""

disable_progress_bar()

_FOLDERS = tempfile.TemporaryDirectory(prefix="tiny-llama-")
_SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def _tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """One token per byte; with `bos` both the tokenizer and the chat template begin a text with `<s>`, as Llama 3's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(_SPECIAL_TOKENS[2:]),
        chat_template=("{{ bos_token }}" if bos else "") + _CHAT_TEMPLATE,
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
    )


def save(*, bos: bool = False, seed: int = 0) -> Path:
    """Writes a model and its tokenizer to a folder that is deleted at exit, as if it had been downloaded.

    Args:
        bos: whether prompts begin with a beginning-of-sequence token.
        seed: seeds the weights; they are large, so that greedy answers depend on the prompt.
    """
    folder = Path(_FOLDERS.name) / f"{seed}{'-bos' if bos else ''}"
    tokenizer = _tokenizer(bos)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape) * (1.0 if "embed" in name else 0.3))
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 0, 1
    model.generation_config.pad_token_id = 1
    model.save_pretrained(folder)
    return folder


class Watch:
    """Counts a model's forwards and keeps the prompts it is given, as long as it is entered.

    Args:
        model: a loaded model.
        tokenizer: its tokenizer.
        says: an answer that is put in its mouth, token by token, end-of-sequence after it; none: its own.
        delay: seconds that each forward takes longer.
        error: raised by every forward.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, says: str = "", delay: float = 0.0, error: Exception | None = None
    ) -> None:
        self.forwards = 0
        self.prompts: list[list[int]] = []
        self._tokenizer = tokenizer
        self._script = [*tokenizer.encode(says, add_special_tokens=False), 1] if says else []
        self._step = 0
        self._delay, self._error = delay, error
        self._model = model
        self._hooks: list[Any] = []

    @property
    def prompt(self) -> str:
        """The last prompt, special tokens and all."""
        return self._tokenizer.decode(self.prompts[-1])

    def __enter__(self) -> Watch:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.forwards += 1
        if ids.shape[1] > 1:
            self.prompts.append(ids[0].tolist())
            self._step = 0
        time.sleep(self._delay)
        if self._error:
            raise self._error

    def _after(self, _: Any, __: tuple[Any, ...], output: Any) -> None:
        if self._script:
            forced = torch.full_like(output.logits, -1e4)
            forced[..., self._script[min(self._step, len(self._script) - 1)]] = 1e4
            output.logits = forced
            self._step += 1
