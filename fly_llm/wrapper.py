"""What every class that offers the engine inside another framework shares.

Its settings as pydantic fields, an engine for them, and what one call is to use. Only the integrations import this;
they bring pydantic.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from fly_llm.config import KNOBS, FLyConfig, SamplingConfig, check_names, overridden, resolve, without_synonyms
from fly_llm.engine import REQUEST_OPTIONS, FLyEngine
from fly_llm.errors import ConfigError
from fly_llm.models.sources import BUNDLED_NAME

PROVIDER = "fly"
LOADING = (
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
"""Fields that say how models are loaded, besides which."""
_FIELDS = {"tokenizer": "tokenizer_given"}
"""Fields whose name is not that of the setting."""
TOLERATED = ("timeout", "max_retries", "api_key", "base_url")
"""Settings of remote models that generic code passes to any model; a local one has no use for them."""
_FLY, _SAMPLING = FLyConfig(), SamplingConfig()


_of_call: ContextVar[Mapping[str, Any]] = ContextVar("fly_llm_of_call", default={})  # noqa: B039, never changed
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def identified_by(settings: Mapping[str, Any]) -> Iterator[None]:
    """Make settings of a call part of `_identity`, for a framework whose cache leaves them out of its key."""
    token = _of_call.set(settings)
    try:
        yield
    finally:
        _of_call.reset(token)


class EngineFields(BaseModel):
    """The settings of a local model, and the engine behind them.

    Fields may be changed between calls. Weights are loaded by the first call, shared by all instances of the same
    models in the process, and freed with the last of them.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True, hide_input_in_errors=True
    )

    model: Any = None
    """Hub name, local folder, GGUF file or loaded `PreTrainedModel`; None is the bundled default."""
    draft_model: Any = None
    """The same for the draft model, which must share the target's tokenizer; None drafts by prompt lookup alone."""

    theta: float = _FLY.theta
    """θ, threshold of the entropy gate; see `fly_llm.FLyConfig`."""
    window: int | None = _FLY.window
    """W, how many tokens after a mismatch must match; None is min(6, K-1)."""
    num_speculative_tokens: int = _FLY.num_speculative_tokens
    """K, most tokens drafted per round; 0 is plain decoding."""
    entropy: str = _FLY.entropy
    """Unit of θ, "top3" or "normalized"."""
    lossless: bool = _FLY.lossless
    """Turn relaxation off: the output is the target's alone. (LangChain's `strict` is about schemas, not this.)"""
    strict_prefix: int = _FLY.strict_prefix
    """The first n generated tokens are never relaxed."""
    strict_zones: list[str] | tuple[str, ...] | str = _FLY.strict_zones
    """Parts of an answer in which nothing is relaxed: "tool", "json", "grammar", "code", "reasoning"."""
    drafting: str = _FLY.drafting
    """"lookup", "model" or "nested"; "auto" is nested where there is a draft model, else lookup."""
    relax_lookup: bool = _FLY.relax_lookup
    """Whether tokens copied from the context by prompt lookup may be relaxed."""
    prefix_cache_bytes: int = _FLY.prefix_cache_bytes
    """Most bytes of finished requests' caches kept for later prompts that begin alike; 0 keeps and uses none."""

    temperature: float = _SAMPLING.temperature
    """0 is greedy decoding."""
    top_p: float = _SAMPLING.top_p
    """Nucleus sampling; 1.0 is off."""
    top_k: int = _SAMPLING.top_k
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = _SAMPLING.min_p
    """Drop tokens less likely than this times the most likely one; 0.0 is off."""
    repetition_penalty: float = _SAMPLING.repetition_penalty
    """1.0 is off. A penalty in the checkpoint's generation config is not inherited."""
    logit_bias: dict[int, float] | None = None
    """Token id to value added to its logit."""
    max_tokens: int | None = _SAMPLING.max_tokens
    """Most new tokens; None is min(1024, room left in the context). `max_new_tokens` is a synonym."""
    stop: list[str] | str | None = None
    """Stop strings; an answer ends before the first of them. Those of a call replace these."""
    seed: int | None = _SAMPLING.seed
    """Seeds sampling; None draws a seed, which the answer reports."""
    ignore_eos: bool = _SAMPLING.ignore_eos
    """Go on after an end-of-sequence token."""

    tokenizer_given: Any = Field(default=None, alias="tokenizer")
    """A tokenizer, or its name; needed for a loaded model. Given as `tokenizer=`; the property of that name encodes."""
    draft_tokenizer: Any = None
    """The same for the draft model."""
    chat_template: str | Path | None = None
    """A Jinja template, or the path of one, instead of the tokenizer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, `{"enable_thinking": False}` for one; those of a call go over them."""
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
    token: str | bool | None = Field(default=None, repr=False, exclude=True)
    """Hub token."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoints."""
    attn_implementation: str | None = None
    """As in transformers."""
    local_files_only: bool = False
    """Never ask the hub."""

    _engine: FLyEngine | None = PrivateAttr(default=None)
    _engine_fields: tuple[Any, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _check_fly_names(cls, values: Any) -> Any:
        """Refuse misspelt settings, which pydantic would drop without a word; accept synonyms."""
        if not isinstance(values, dict):
            return values
        values = without_synonyms({name: value for name, value in values.items() if name not in TOLERATED})
        aliases = {field.alias for field in cls.model_fields.values() if field.alias}
        check_names(values, {*cls.model_fields, *aliases})
        return values

    @model_validator(mode="after")
    def _hold_fly_engine(self) -> Self:
        """Check the settings now, and hold the weights (not loaded yet) for as long as this instance lives."""
        self._settle()
        return self

    def _settle(self) -> None:
        """Check settings and hold the engine. A path means what it means now, wherever the process goes later."""
        resolve(_FLY, _SAMPLING, self._knobs())
        for name in ("model", "draft_model", "tokenizer_given", "draft_tokenizer", "chat_template"):
            setattr(self, name, _absolute(getattr(self, name)))
        self._get_engine()

    def with_options(self, **options: Any) -> Self:
        """A copy with other settings, for code that does not pass per-call settings on; it shares the weights.

        What has been bound to a model with `bind` is not part of it: call this first, then `bind`.

        Args:
            **options: any field of this class.

        Raises:
            ConfigError: an unknown name or a value out of range.
        """
        options = {_FIELDS.get(name, name): value for name, value in without_synonyms(options).items()}
        check_names(options, type(self).model_fields)
        changed = self.model_copy(update=options)
        changed._engine, changed._engine_fields = None, ()
        changed._settle()
        return changed

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """Text to token ids by the target's tokenizer, for whatever counts tokens; loads the models when called."""
        return self.encode

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it would be in a message. Loads the models if they are not loaded."""
        return self._get_engine().encode(text)

    def close(self) -> None:
        """Release the weights, unless another instance still uses them. The next call would load them again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __getstate__(self) -> dict[str, Any]:
        """Settings alone: the copy finds its engine by them. Raises `TypeError` for loaded models."""
        engine = self._get_engine()
        if engine.is_live:
            engine.__reduce__()  # says what to do instead
        state = super().__getstate__()
        private = state.get("__pydantic_private__") or {}
        return {**state, "__pydantic_private__": {**private, "_engine": None, "_engine_fields": ()}}

    def _knobs(self) -> dict[str, Any]:
        """The settings of a request that gives none."""
        return {name: getattr(self, name) for name in KNOBS}

    def _loading_fields(self) -> tuple[Any, ...]:
        return (self.model, self.draft_model, *self._loading().values())

    def _loading(self) -> dict[str, Any]:
        return {name: getattr(self, _FIELDS.get(name, name)) for name in LOADING}

    def _get_engine(self) -> FLyEngine:
        """The engine for the current field values; loads nothing."""
        fields = self._loading_fields()
        same = len(fields) == len(self._engine_fields) and all(
            new is old or (isinstance(new, (str, int, Path)) and new == old)
            for new, old in zip(fields, self._engine_fields, strict=True)
        )
        engine = self._engine
        if engine is None or engine.closed or not same:  # a copy of this instance may hold the old one, or close it
            model, draft, *loading = fields
            engine = FLyEngine.from_pretrained(model, draft, **dict(zip(LOADING, loading, strict=True)))
            self._engine, self._engine_fields = engine, fields
        return engine

    def _call(self, given: Mapping[str, Any], *, ignored: Iterable[str] = (), chat: bool = True) -> dict[str, Any]:
        """What one call is to use: this instance's settings, under `overrides`, under those given. None is not given.

        Args:
            given: the arguments of the call.
            ignored: names among them that mean nothing here.
            chat: the prompt is a chat, and goes through the chat template.

        Raises:
            ConfigError: an unknown name (the nearest is suggested).
        """
        skipped = {*ignored, *TOLERATED}
        given = {name: value for name, value in given.items() if value is not None and name not in skipped}
        if wrong := [name for name in given if name in ("model", "draft_model", *LOADING)]:
            raise ConfigError(
                f"{wrong[0]} cannot be changed in a call, which would load a model for it: use "
                f"with_options({wrong[0]}=...), whose copy keeps what it has loaded, or another instance"
            )
        given = without_synonyms(given)
        check_names(given, (*KNOBS, *REQUEST_OPTIONS))
        if self.chat_template_kwargs and chat:
            given["chat_template_kwargs"] = {**self.chat_template_kwargs, **(given.get("chat_template_kwargs") or {})}
        return {**self._knobs(), **overridden(), **given}

    def _identity(self) -> dict[str, Any]:
        """Everything that changes the output, JSON-able; for cache keys and traces."""
        knobs = {**self._knobs(), **overridden(), **_of_call.get()}
        del knobs["prefix_cache_bytes"]
        knobs["default_stop"] = knobs.pop("stop")  # LangChain puts the stop strings of a call under the other name
        loading = {name: value for name, value in self._loading().items() if name != "token"}
        names = {"model": self.model, "draft_model": self.draft_model}
        names["chat_template_kwargs"] = self.chat_template_kwargs
        return {name: _stable(value) for name, value in {**names, **knobs, **loading}.items()}

    @property
    def _model_name(self) -> str:
        """What the target is called, without loading it."""
        if self.model is None:
            return BUNDLED_NAME
        if isinstance(self.model, (str, Path)):
            return str(self.model)
        return str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)


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
    try:  # an address is used again once its object is gone
        return _names.setdefault(value, f"{type(value).__name__} {uuid.uuid4().hex}")
    except TypeError:
        return f"{type(value).__name__} at {id(value):#x}"


def _absolute(place: Any) -> Any:
    """The absolute path of a file or folder that is there; anything else as it is."""
    if isinstance(place, (str, Path)) and str(place) and not {"{", "\n"} & set(str(place)):
        path = Path(place).expanduser()
        if path.exists():
            return str(path.absolute())
    return place
