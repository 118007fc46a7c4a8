"""`ChatFLy`: a local model, sped up by FLy, as a LangChain chat model.

Messages are converted (`messages.py`), answered by a `FLyEngine`, and streamed back as chunks of committed text. The
last chunk alone carries usage, finish reason and statistics, because LangChain adds up the numbers of chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core import exceptions as core_exceptions
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from fly_llm.config import KNOBS, FLyConfig, SamplingConfig, check_names, resolve
from fly_llm.engine import TEMPLATE_OPTIONS, FLyEngine
from fly_llm.errors import ContextOverflowError
from fly_llm.models.sources import BUNDLED_NAME
from fly_llm.types import Event, Result
from langchain_fly.messages import to_chat

_LOADING = (
    "tokenizer",
    "draft_tokenizer",
    "chat_template",
    "dtype",
    "device_map",
    "draft_device",
    "quantization_config",
    "draft_quantization_config",
    "revision",
    "draft_revision",
    "token",
    "trust_remote_code",
    "attn_implementation",
    "local_files_only",
)
_TOLERATED = ("timeout", "max_retries", "api_key", "base_url")
"""Settings of remote models that generic code passes to any chat model; a local one has no use for them."""
_PROVIDER = "fly"


class ChatFLyContextOverflowError(ContextOverflowError, core_exceptions.ContextOverflowError):
    """The messages leave no room for an answer; caught as LangChain's error and as fly-llm's."""


class ChatFLy(BaseChatModel):
    """A local chat model, sped up by loose speculative decoding (FLy). `ChatFLy()` alone uses the bundled model.

    FLy is lossy: a token the target would not have chosen may be kept where the target is unsure and the next
    `window` tokens all agree. `response_metadata["fly"]` of every answer says how many were kept and where;
    `lossless=True`, here or in one call, turns it off.

    Every field below that is a setting of FLy or of sampling can also be given per call, `llm.invoke(x, theta=0.2)`, or
    bound, `llm.bind(theta=0.2)`. Weights are loaded by the first call and shared by all instances of the same models.

    Example:
        >>> llm = ChatFLy(model="Qwen/Qwen2.5-7B-Instruct", draft_model="Qwen/Qwen2.5-0.5B-Instruct")
        >>> answer = llm.invoke("Why is the sky blue?", theta=0.15, window=4)
        >>> answer.response_metadata["fly"]["num_relaxed_tokens"]
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = None
    """Hub name, local folder, GGUF file or loaded `PreTrainedModel`; None is the bundled default."""
    draft_model: Any = None
    """The same for the draft model, which must share the target's tokenizer; None drafts by prompt lookup alone."""

    theta: float = FLyConfig().theta
    """θ, threshold of the entropy gate; see `fly_llm.FLyConfig`."""
    window: int | None = None
    """W, how many tokens after a mismatch must match; None is min(6, K-1)."""
    num_speculative_tokens: int = FLyConfig().num_speculative_tokens
    """K, most tokens drafted per round; 0 is plain decoding."""
    entropy: str = "top3"
    """Unit of θ, "top3" or "normalized"."""
    lossless: bool = False
    """Turn relaxation off: the output is the target's alone. (LangChain's `strict` is about schemas, not this.)"""
    strict_prefix: int = 0
    """The first n generated tokens are never relaxed."""
    drafting: str = "auto"
    """"lookup", "model" or "nested"; "auto" is nested where there is a draft model, else lookup."""
    relax_lookup: bool = True
    """Whether tokens copied from the context by prompt lookup may be relaxed."""

    temperature: float = 0.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling; 1.0 is off."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; 0.0 is off."""
    repetition_penalty: float = 1.0
    """1.0 is off. A penalty in the checkpoint's generation config is not inherited."""
    logit_bias: dict[int, float] | None = None
    """Token id to value added to its logit."""
    max_tokens: int | None = None
    """Most new tokens; None is min(1024, room left in the context). `max_new_tokens` is a synonym."""
    stop: list[str] | str | None = None
    """Stop strings; an answer ends before the first of them. Those of a call replace these."""
    seed: int | None = None
    """Seeds sampling; None draws a seed, which the answer reports."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""

    tokenizer: Any = None
    """A tokenizer, or its name; needed for a loaded model."""
    draft_tokenizer: Any = None
    """The same for the draft model."""
    chat_template: str | Path | None = None
    """A Jinja template, or the path of one, instead of the tokenizer's."""
    dtype: Any = "auto"
    """"auto" (the checkpoint's), "bfloat16", "float16", "float32" or a torch dtype."""
    device_map: Any = None
    """None is cuda, else mps, else cpu; "auto" shards."""
    draft_device: Any = None
    """Where the draft model goes, if elsewhere."""
    quantization_config: Any = None
    """As in transformers, for the target."""
    draft_quantization_config: Any = None
    """The same for the draft model."""
    revision: str | None = None
    """Branch, tag or commit of a hub target."""
    draft_revision: str | None = None
    """The same for the draft model."""
    token: str | bool | None = Field(default=None, repr=False)
    """Hub token."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoints."""
    attn_implementation: str | None = None
    """As in transformers."""
    local_files_only: bool = False
    """Never ask the hub."""
    streaming: bool = False
    """Stream inside `invoke` as well, so that callbacks see tokens."""

    _engine: FLyEngine | None = PrivateAttr(default=None)
    _engine_fields: tuple[Any, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        """Refuse misspelt settings, which pydantic would drop without a word; accept synonyms."""
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if name not in _TOLERATED}
        if "max_new_tokens" in values:
            if "max_tokens" in values:
                raise ValueError("max_new_tokens is a synonym of max_tokens: give one of them")
            values["max_tokens"] = values.pop("max_new_tokens")
        aliases = {field.alias for field in cls.model_fields.values() if field.alias}
        check_names(values, {*cls.model_fields, *aliases})
        return values

    @model_validator(mode="after")
    def _hold_engine(self) -> ChatFLy:
        """Check the settings now, and hold the weights (not loaded yet) for as long as this instance lives."""
        resolve(FLyConfig(), SamplingConfig(), self._knobs())
        self._get_engine()
        return self

    def _knobs(self) -> dict[str, Any]:
        """The settings of a request that gives none."""
        return {name: getattr(self, name) for name in KNOBS}

    def _get_engine(self) -> FLyEngine:
        """The engine for the current field values; loads nothing. Fields may be changed between calls."""
        loading = {name: getattr(self, name) for name in _LOADING}
        fields = (self.model, self.draft_model, *loading.values())
        same = len(fields) == len(self._engine_fields) and all(
            new is old or (isinstance(new, (str, int, Path)) and new == old)
            for new, old in zip(fields, self._engine_fields, strict=True)
        )
        engine = self._engine
        if engine is None or engine.closed or not same:  # a copy of this instance may hold the old one, or close it
            engine = FLyEngine.from_pretrained(self.model, self.draft_model, **loading)
            self._engine, self._engine_fields = engine, fields
        return engine

    def close(self) -> None:
        """Release the weights, unless another instance still uses them. The next call would load them again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    @property
    def _llm_type(self) -> str:
        return "chat-fly"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes the output; part of LangChain's cache key and of traces."""
        names = [name for name in (*KNOBS, *_LOADING) if name != "token"]
        params = {name: _stable(getattr(self, name)) for name in names}
        return {"model": _stable(self.model), "draft_model": _stable(self.draft_model), **params}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=_PROVIDER,
            ls_model_name=str(kwargs.get("model") or _name(self.model)),
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", self.temperature),
        )
        max_tokens = kwargs.get("max_tokens", kwargs.get("max_new_tokens", self.max_tokens))
        if max_tokens is not None:
            params["ls_max_tokens"] = max_tokens
        if stops := stop if stop is not None else self.stop:
            params["ls_stop"] = [stops] if isinstance(stops, str) else stops
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text as it would be in a message, by the target's tokenizer."""
        tokenizer = self._get_engine().tokenizer
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the rendered prompt, counted with the real chat template."""
        options = {"tools": tools} if tools else {}
        return self._get_engine().count_tokens(to_chat(messages), **options)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Not there yet: tools would reach the model, but its calls would come back as text."""
        raise NotImplementedError("ChatFLy does not do tool calling yet: use a chain that needs no tools")

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
        """Not there yet: it takes decoding under a grammar."""
        raise NotImplementedError(
            "ChatFLy does not do structured output yet: ask for JSON in the prompt and use a JsonOutputParser"
        )

    def _call(self, stop: list[str] | str | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of one call: this instance's, then those given. None means "not given"."""
        ignored = ("stream", *_TOLERATED)
        given = {name: value for name, value in kwargs.items() if value is not None and name not in ignored}
        check_names(given, (*KNOBS, *TEMPLATE_OPTIONS, "max_new_tokens"))
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        if stop is not None:
            given["stop"] = stop
        return {**self._knobs(), **given}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop=stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with contextlib.aclosing(self._astream(messages, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            return await agenerate_from_stream(chunks)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with _core_errors(), self._get_engine().stream(to_chat(messages), **self._call(stop, kwargs)) as events:
            for event in events:
                if chunk := _chunk(event):
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with _core_errors():
            stream = self._get_engine().astream(to_chat(messages), **self._call(stop, kwargs))
            async with contextlib.aclosing(stream) as events:  # type: ignore[type-var]
                async for event in events:
                    if chunk := _chunk(event):
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk


def _chunk(event: Event) -> ChatGenerationChunk | None:
    """A chunk for an event; None where there is nothing to say yet."""
    if event.result is not None:
        return _last_chunk(event.text, event.result)
    return ChatGenerationChunk(message=AIMessageChunk(content=event.text)) if event.text else None


def _last_chunk(text: str, result: Result) -> ChatGenerationChunk:
    """The chunk that carries what is said once: usage, finish reason, model and statistics."""
    usage = result.usage
    message = AIMessageChunk(
        content=text,
        usage_metadata={
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        response_metadata={
            "model_name": result.settings["model"],
            "model_provider": _PROVIDER,
            "finish_reason": result.finish_reason,
            "fly": result.report(),
        },
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message)


@contextlib.contextmanager
def _core_errors() -> Iterator[None]:
    """Raise what LangChain's own code looks for, where it has a name for it."""
    try:
        yield
    except ContextOverflowError as error:
        raise ChatFLyContextOverflowError(error.prompt_tokens, error.context_window) from error


def _name(model: Any) -> str:
    """What a model is called without loading it."""
    if model is None:
        return BUNDLED_NAME
    if isinstance(model, (str, Path)):
        return str(model)
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def _stable(value: Any) -> Any:
    """A JSON-able stand-in that differs between different values; a live object is known by its identity."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items()}
    if isinstance(value, Path) or type(value).__module__ == "torch":
        return str(value)
    return f"{type(value).__name__} at {id(value):#x}"
