"""What can go wrong, as the few kinds a caller can act on.

Every message says what happened, with the value, and what to do about it.
"""

from __future__ import annotations

from typing import Any


class FLyError(Exception):
    """Base of every error fly-llm raises on purpose."""


class ConfigError(FLyError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class PromptError(FLyError, ValueError):
    """The prompt or the messages cannot be turned into tokens (empty, images, no chat template, unknown role)."""


class ContextOverflowError(PromptError):
    """The prompt leaves no room for a single new token.

    Attributes:
        prompt_tokens: length of the prompt in tokens.
        context_window: the most tokens the target can hold, prompt and answer together.
    """

    def __init__(self, prompt_tokens: int, context_window: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the target's context window holds {context_window}, "
            "which leaves no room for an answer: shorten the prompt, retrieve fewer documents, drop old turns, "
            "or use a target with a longer context"
        )
        self.prompt_tokens = prompt_tokens
        self.context_window = context_window

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prompt_tokens, self.context_window)


class ModelLoadError(FLyError):
    """A model or tokenizer could not be loaded (unknown name, missing file, corrupt GGUF, missing dependency)."""


class TokenizerMismatchError(ModelLoadError):
    """The draft model's tokenizer is not the target's, so its token ids mean something else."""


class UnsupportedCacheError(FLyError):
    """The model's key/value cache cannot be rolled back, which speculative decoding needs after every rejection."""


class EngineClosedError(FLyError, RuntimeError):
    """A request was made on an engine after `close()`."""
