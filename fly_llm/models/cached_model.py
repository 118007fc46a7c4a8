"""A model and the cache of the tokens it has seen. Everything this project knows about transformers' cache API is here.

- transformers 5.24 renamed the forward's `past_key_values`, and the `cache_params` of recurrent models, to `cache`; all
  three names are handled.
- `Cache.crop` takes a negative count; this class takes an absolute length, which cannot drift.
- Sliding-window layers drop their past unless recording is on, and their `crop` drops what rolls out of the window.
  Several rollbacks in a row (nested drafting) need that past, so rolling back and giving up the past are two calls:
  `truncate` and `settle`.
- Whether a cache can be cropped is known only after it has been used.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from fly_llm.errors import UnsupportedCacheError

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass
class Past:
    """The cache of a finished request, taken out of its `CachedModel` for a later one to go on from.

    Attributes:
        cache: transformers' cache.
        length: how many tokens it holds.
        restorable: the shortest length it can be truncated to.
    """

    cache: Any
    length: int
    restorable: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory its tensors hold on to, parts that are cut off but not freed included."""
        found: dict[int, int] = {}
        for layer in self.cache.layers:
            for value in vars(layer).values():
                for tensor in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(tensor, Tensor):
                        storage = tensor.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    @torch.inference_mode()
    def copy(self, length: int) -> Past:
        """A copy of the first `length` tokens' cache at least; what is longer is cut off when it is attached."""
        whole = copy.copy(self.cache)
        plain = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        if not plain:
            return Past(copy.deepcopy(self.cache), self.length, self.restorable)
        whole.layers = []
        for layer in self.cache.layers:
            part = copy.copy(layer)
            if layer.is_initialized:
                part.keys, part.values = layer.keys[..., :length, :].clone(), layer.values[..., :length, :].clone()
            whole.layers.append(part)
        return Past(whole, length, self.restorable)


class CachedModel:
    """One sequence's view of a causal language model.

    Args:
        model: a transformers causal language model.
        max_length: the most tokens it can hold; None if unknown.
        vocab_size: slice the logits to this width (a draft model padded wider than its target).
        rollback: prepare the cache for `truncate`. Plain decoding does not need it, and works on caches that cannot
            be rolled back.
    """

    def __init__(
        self, model: Any, *, max_length: int | None = None, vocab_size: int | None = None, rollback: bool = True
    ) -> None:
        self._model = model
        self._max_length = max_length
        config = model.config.get_text_config(decoder=True)
        self._config = config
        self._vocab_size: int = min(config.vocab_size, vocab_size or config.vocab_size)
        self._rollback = rollback
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), "past_key_values")
        self._keeps_logits = "logits_to_keep" in names
        self._takes_positions = "position_ids" in names
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        length = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
        length = length or getattr(config, "original_max_position_embeddings", None)
        self._switch: int | None = int(length) if kind == "longrope" and length else None
        self._num_forwards: int = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything and release the cache's memory."""
        self._cache: Any = None  # transformers' layer classes share no typed interface
        self._length: int = 0
        self._restorable: int = 0

    def detach(self) -> Past | None:
        """Take the cache out, and start with an empty one; None if it is empty, or cannot be gone on from."""
        cache, length, restorable = self._cache, self._length, self._restorable
        if cache is None or not length or not (self.resumes or self._rollback):  # with a recorded past, all resume
            return None
        if not self._rollback and any(map(_forgets, cache.layers)):
            restorable = length
        if not cache.is_croppable:
            restorable = length
        self.reset()
        return Past(cache, length, restorable)

    def attach(self, past: Past, length: int) -> None:
        """Go on from a cache of this model, made with the same `rollback`, truncated to its first `length` tokens."""
        self._cache, self._length, self._restorable = past.cache, past.length, past.restorable
        self.truncate(length)

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""
        return self._length

    @property
    def max_length(self) -> int | None:
        """The most tokens the model can hold, None if unknown."""
        return self._max_length

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    @property
    def num_forwards(self) -> int:
        """Forwards run since the last `reset`."""
        return self._num_forwards

    @property
    def shortest_restorable(self) -> int:
        """`truncate` works down to this length: below it, a sliding-window layer has dropped what it would need."""
        return self._restorable

    @property
    def switch(self) -> int | None:
        """The length above which all positions are encoded otherwise (longrope), the cached ones too; None for most."""
        return self._switch

    @property
    def resumes(self) -> bool:
        """Whether several tokens may follow cached ones. Models with recurrent states start over instead, silently."""
        if self._switch is not None:
            return False
        return not any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=self._config).layers)

    @torch.inference_mode()
    def advance(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Run tokens through the model, after the ones the cache holds.

        Args:
            tokens: at least one.
            num_logits: how many of the last positions to return, 1 to len(tokens).

        Returns:
            [num_logits, vocab_size] logits in the model's dtype, on its device.
        """
        if self._cache is None:
            self._cache = DynamicCache(config=self._config)
            if self._rollback:
                self._cache.activate_past_recording()
        inputs: dict[str, Any] = {self._cache_name: self._cache}
        if self._keeps_logits:
            inputs["logits_to_keep"] = num_logits
        ids = torch.tensor([list(tokens)], device=self._model.device)
        if self._takes_positions:  # some hybrids do not ask the cache how far they are
            inputs["position_ids"] = torch.arange(self._length, self._length + len(tokens), device=ids.device)[None]
        output = self._model(input_ids=ids, use_cache=True, return_dict=True, **inputs)
        self._num_forwards += 1
        self._length += len(tokens)
        if self._length == len(tokens) and not any(map(_is_used, self._cache.layers)):
            raise UnsupportedCacheError(
                f"{type(self._model).__name__} does not keep its past in transformers' cache, so it cannot be decoded "
                "here: use another model, or its own generate()"
            )
        logits: Tensor = output.logits[0, -num_logits:, : self._vocab_size]
        return logits

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. The past that sliding layers still record is kept; see `settle`.

        Raises:
            UnsupportedCacheError: the cache cannot go back that far.
            ValueError: the cache is shorter than `length`.
        """
        remove = self._length - length
        if remove < 0:
            raise ValueError(f"cannot truncate a cache of {self._length} tokens to {length}")
        if remove == 0 or self._cache is None:
            return
        if length < self._restorable:
            raise UnsupportedCacheError(
                f"the cache of {self._length} tokens can be truncated to {self._restorable} or more, not to {length}: "
                "layers that keep only the recent past have dropped the tokens before. Start a new cache instead"
            )
        for layer in self._cache.layers:
            kind: Any = type(layer)  # a subclass may keep more than these do
            if kind is DynamicSlidingWindowLayer and layer.is_initialized:
                layer.keys = layer.keys[..., :-remove, :]
                layer.values = layer.values[..., :-remove, :]
                layer.cumulative_length -= remove
            elif kind is LinearAttentionLayer:
                states = layer.conv_states
                states.update({i: state[..., :-remove] for i, state in states.items() if state is not None})
            else:
                layer.crop(-remove)
                if _forgets(layer):  # here a crop drops the recorded past as well
                    self._restorable = length
        self._length = length

    def settle(self) -> None:
        """Give up what is only needed to truncate below the current length (the past of sliding-window layers)."""
        if self._cache is None or not self._rollback or not self._cache.is_croppable:
            return  # `check_rollback` refuses the last of these, with its reason
        for layer in self._cache.layers:
            if _forgets(layer):
                layer.crop(0)
                if self._length >= getattr(layer, "sliding_window", 0):
                    self._restorable = self._length

    def check_rollback(self) -> None:
        """Check that the cache can be truncated; only meaningful once it holds tokens.

        Raises:
            UnsupportedCacheError: it cannot; nothing has been generated yet.
        """
        cache = self._cache
        if cache is not None and self._rollback and not (cache.is_croppable and cache.get_seq_length() == self._length):
            names = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
            kinds = ", ".join(names) or "unused"
            raise UnsupportedCacheError(
                f"{type(self._model).__name__} keeps a cache that cannot be rolled back ({kinds}), "
                "so it can neither verify drafts nor draft. Use num_speculative_tokens=0 (plain decoding) or another "
                "model"
            )


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Changes with a model's weights, and with its active adapter."""
    try:
        versions = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    except (RuntimeError, NotImplementedError):  # weights made in inference mode have no version
        versions = ()
    adapter = getattr(model, "active_adapter", None)
    return hash(versions), adapter if isinstance(adapter, str) else None


def _is_used(layer: Any) -> bool:
    """Whether a cache layer holds anything."""
    flags = [getattr(layer, f"is_{kind}_states_initialized", {}).values() for kind in ("conv", "recurrent")]
    return getattr(layer, "is_initialized", False) or any(any(values) for values in flags)


def _forgets(layer: Any) -> bool:
    """Whether a cache layer keeps only the recent past: a sliding window, or convolution states."""
    return isinstance(layer, DynamicSlidingWindowLayer) or hasattr(layer, "conv_states")
