"""What the chat model and the completion model share: LangChain's names for usage, traces and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from langchain_core import exceptions as core
from langchain_core.language_models import LangSmithParams
from langchain_core.messages.ai import UsageMetadata

from fly_llm.config import overridden
from fly_llm.errors import (
    ConfigError,
    ContextOverflowError,
    FLyError,
    ModelLoadError,
    PromptError,
    TokenizerMismatchError,
)
from fly_llm.types import Result
from fly_llm.wrapper import PROVIDER, EngineFields


class ChatFLyContextOverflowError(ContextOverflowError, core.ContextOverflowError):
    """The messages leave no room for an answer; caught as LangChain's error and as fly-llm's."""


class ChatFLyConfigError(ConfigError, core.ModelInvalidRequestError):
    """A setting is unknown or out of range; likewise."""


class ChatFLyPromptError(PromptError, core.ModelInvalidRequestError):
    """The messages are not what the model can take; likewise."""


class ChatFLyModelLoadError(ModelLoadError, core.ModelNotFoundError):
    """A model could not be loaded; likewise."""


class ChatFLyTokenizerMismatchError(TokenizerMismatchError, core.ModelNotFoundError):
    """The draft model does not fit the target; likewise."""


_BOTH: dict[type[FLyError], type[FLyError]] = {
    ContextOverflowError: ChatFLyContextOverflowError,
    ConfigError: ChatFLyConfigError,
    PromptError: ChatFLyPromptError,
    ModelLoadError: ChatFLyModelLoadError,
    TokenizerMismatchError: ChatFLyTokenizerMismatchError,
}


@contextlib.contextmanager
def core_errors() -> Iterator[None]:
    """Raise errors that are caught as fly-llm's and as LangChain's, where it has a name for them."""
    try:
        yield
    except FLyError as error:
        both = _BOTH.get(type(error))
        if both is None:
            raise
        translated = both.__new__(both)
        translated.args = error.args
        vars(translated).update(vars(error))
        raise translated from error


def usage_metadata(result: Result) -> UsageMetadata:
    """LangChain's token counts; `cache_read` counts prompt tokens that an earlier request had left in the cache."""
    usage = result.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )


def metadata(result: Result) -> dict[str, Any]:
    """What an answer says about itself, once."""
    return {
        "model_name": result.settings["model"],
        "model_provider": PROVIDER,
        "finish_reason": result.finish_reason,
        "fly": result.report(),
    }


def ls_params(
    llm: EngineFields, kind: Literal["chat", "llm"], stop: list[str] | None, kwargs: Mapping[str, Any]
) -> LangSmithParams:
    """What LangSmith is told about a call, values given in the call included."""
    settings = {**llm._knobs(), **overridden(), **{name: value for name, value in kwargs.items() if value is not None}}
    params = LangSmithParams(
        ls_provider=PROVIDER,
        ls_model_name=str(kwargs.get("model") or llm._model_name),
        ls_model_type=kind,
        ls_temperature=settings["temperature"],
    )
    max_tokens = settings.get("max_new_tokens", settings["max_tokens"])
    if max_tokens is not None:
        params["ls_max_tokens"] = max_tokens
    if stops := stop if stop is not None else settings["stop"]:
        params["ls_stop"] = list(stops) if isinstance(stops, (list, tuple)) else [str(stops)]
    return params
