"""Settings of a request: what FLy may do, and how tokens are chosen.

Both classes are frozen and validated when they are made; `resolve` is the one way per-call values reach them, so a
misspelt name is an error everywhere (Python, LangChain, LlamaIndex, command line).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from fly_llm.errors import ConfigError

Entropy = Literal["top3", "normalized"]
Drafting = Literal["auto", "lookup", "model", "nested"]
ZONES = ("tool", "json", "grammar", "code", "reasoning")
DEFAULT_MAX_TOKENS = 1024
"""What an unset `max_tokens` means, where the context has room for it."""


@dataclass(frozen=True, slots=True)
class FLyConfig:
    """How many tokens are drafted, and which mismatches may be kept.

    Attributes:
        theta: θ, threshold of the entropy gate: a mismatch is considered only where the target's entropy is at least
            this (nats for `entropy="top3"`, a fraction of log |V| for `"normalized"`). `inf` is strict.
        window: W, how many tokens after a mismatch must all match for it to be kept. `None` is min(6, K-1). Must be
            smaller than K; ignored when K ≤ 1 or `lossless`.
        num_speculative_tokens: K, the most tokens proposed in a round. 0 is plain decoding by the same loop.
        entropy: `"top3"` is −Σ p log p over the three most likely tokens of the full softmax (0 to 1.0986 nats; what
            the authors' code and vLLM use). It is not monotone: a very flat distribution (three tokens of 0.02 each)
            gives 0.235 and counts as certain. `"normalized"` is the paper's Eq. 5, full entropy / log |V|; 0.3 then
            means about 3.6 nats, which few positions reach.
        lossless: turn relaxation off. The output is what the target alone would have written.
        strict_prefix: the first n generated tokens are never relaxed.
        strict_zones: parts of an answer in which nothing is relaxed: "tool" (tool calls), "json" (a json fence, or JSON
            as the answer), "grammar" (an answer under a grammar), "code" (other fenced blocks), "reasoning".
        drafting: "lookup" copies from the context, "model" asks the draft model, "nested" lets lookup draft for the
            draft model; "auto" is nested where there is a draft model, else lookup.
        relax_lookup: whether tokens that prompt lookup sends straight to the target may be relaxed. They are copies
            of the context, so a relaxed one can be a wrong name or number, or the start of an earlier answer, which
            then goes on word by word. Off unless asked for; without a draft model, FLy then is lossless.
        prefix_cache_bytes: most bytes of key/value caches of finished requests, of both models together, that are kept
            for later prompts which begin alike (a conversation's next turn). 0 keeps and uses none.
    """

    theta: float = 0.3
    window: int | None = None
    num_speculative_tokens: int = 15
    entropy: Entropy = "top3"
    lossless: bool = False
    strict_prefix: int = 0
    strict_zones: tuple[str, ...] = ("tool", "json", "grammar")
    drafting: Drafting = "auto"
    relax_lookup: bool = False
    prefix_cache_bytes: int = 2**29

    def __post_init__(self) -> None:
        _number("theta", self.theta, low=0.0, infinite=True)
        _integer("num_speculative_tokens", self.num_speculative_tokens, low=0)
        _integer("strict_prefix", self.strict_prefix, low=0)
        _integer("prefix_cache_bytes", self.prefix_cache_bytes, low=0)
        if self.entropy not in ("top3", "normalized"):
            raise ConfigError(f"entropy must be 'top3' or 'normalized', got {self.entropy!r}")
        if self.drafting not in ("auto", "lookup", "model", "nested"):
            raise ConfigError(f"drafting must be 'auto', 'lookup', 'model' or 'nested', got {self.drafting!r}")
        zones = (self.strict_zones,) if isinstance(self.strict_zones, str) else tuple(self.strict_zones or ())
        if wrong := [zone for zone in zones if zone not in ZONES]:
            raise ConfigError(f"strict_zones must be some of {', '.join(map(repr, ZONES))}, got {wrong[0]!r}")
        object.__setattr__(self, "strict_zones", zones)
        _boolean("lossless", self.lossless)
        _boolean("relax_lookup", self.relax_lookup)
        if self.window is not None:
            _integer("window", self.window, low=1)
            k = self.num_speculative_tokens
            if not self.lossless and k > 1 and self.window >= k:
                raise ConfigError(
                    f"window={self.window} must be smaller than num_speculative_tokens={k}: a mismatch needs that many "
                    f"drafted tokens after it. Use window <= {k - 1}, a larger num_speculative_tokens, window=None for "
                    "the default min(6, num_speculative_tokens - 1), or lossless=True"
                )

    @property
    def relaxes(self) -> bool:
        """Whether any mismatch can be kept at all under these settings."""
        return not self.lossless and self.num_speculative_tokens > 1 and self.theta != math.inf

    @property
    def effective_window(self) -> int | None:
        """W as it is applied, or None where nothing is relaxed."""
        if not self.relaxes:
            return None
        return self.window if self.window is not None else min(6, self.num_speculative_tokens - 1)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the target's next token is chosen, and when the answer ends.

    Attributes:
        temperature: 0 is greedy decoding, and so is anything below 0.0001, where nothing else could happen.
        top_p: nucleus sampling; 1.0 is off.
        top_k: keep the k most likely tokens; 0 is off.
        min_p: drop tokens less likely than min_p times the most likely one; 0.0 is off.
        repetition_penalty: transformers' repetition penalty; 1.0 is off.
        logit_bias: token id -> value added to its logit; `-inf` forbids the token.
        max_tokens: most new tokens. `None` is min(1024, room left in the context); a larger value than the room
            left is capped to it.
        stop: stop strings. The answer ends before the first of them; its text is not part of the answer.
        seed: seeds every random draw of the request. `None` draws a seed, which is reported.
        ignore_eos: go on after an end-of-sequence token (for benchmarks of a fixed length).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, without chance."""
        return self.temperature < 1e-4

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p must be above 0, got 0.0: use temperature=0 for greedy decoding")
        _integer("top_k", self.top_k, low=0)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0)
        if self.repetition_penalty == 0.0:
            raise ConfigError("repetition_penalty must be above 0, got 0.0: 1.0 turns it off")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _integer("seed", self.seed, low=0)
        _boolean("ignore_eos", self.ignore_eos)
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise ConfigError(f"stop must be a string or a list of strings, got {self.stop!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop must be non-empty strings, got {text!r}")
        object.__setattr__(self, "stop", stop)
        if self.logit_bias is not None:
            try:
                bias = {int(token): float(value) for token, value in self.logit_bias.items()}
            except (AttributeError, TypeError, ValueError):
                raise ConfigError(
                    f"logit_bias must map token ids to numbers, for example {{42: -5.0}}, got {self.logit_bias!r}"
                ) from None
            if any(math.isnan(value) or value == math.inf or token < 0 for token, value in bias.items()):
                raise ConfigError(f"logit_bias needs ids >= 0 and values that are finite or -inf, got {bias}")
            object.__setattr__(self, "logit_bias", bias)


FLY_FIELDS = tuple(field.name for field in dataclasses.fields(FLyConfig))
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingConfig))
KNOBS = FLY_FIELDS + SAMPLING_FIELDS


def resolve(fly: FLyConfig, sampling: SamplingConfig, overrides: Mapping[str, Any]) -> tuple[FLyConfig, SamplingConfig]:
    """Apply per-call values on top of an engine's settings.

    Args:
        fly: the engine's FLy settings.
        sampling: the engine's sampling settings.
        overrides: any field of either class. A value of None means "the field's default" only for `window`,
            `logit_bias`, `max_tokens`, `seed` and `stop`, whose default it is.

    Raises:
        ConfigError: a name is unknown (the nearest known one is suggested) or a value is out of range.
    """
    check_names(overrides, KNOBS)
    changed_fly = {name: value for name, value in overrides.items() if name in FLY_FIELDS}
    changed_sampling = {name: value for name, value in overrides.items() if name in SAMPLING_FIELDS}
    return dataclasses.replace(fly, **changed_fly), dataclasses.replace(sampling, **changed_sampling)


_overrides: ContextVar[Mapping[str, Any]] = ContextVar("fly_llm_overrides", default={})  # noqa: B039, never changed


@contextlib.contextmanager
def overrides(**knobs: Any) -> Iterator[None]:
    """Settings for every request made inside a `with` block, through whatever code makes it.

    For query engines and agents, which pass no settings on. They go over the settings of an engine, a `ChatFLy` or an
    `FLyLLM`, and under those given to a single call; an inner block goes over an outer one. They are kept in a context
    variable: tasks, and threads that take their parent's context along (`asyncio.to_thread`, LangChain's and
    LlamaIndex's own pools) see them, and no other task does. Read streams inside the block: many ask the model only
    when they are read. A bare `threading.Thread` starts with an empty context:
    start it with `contextvars.copy_context().run`. A block inside a generator holds in its consumer as well, while the
    generator waits there.

    Args:
        **knobs: any field of `FLyConfig` and `SamplingConfig`.

    Raises:
        ConfigError: an unknown name or a value out of range.
    """
    knobs = without_synonyms(knobs)
    roomy = FLyConfig(num_speculative_tokens=2**31)  # whether the window fits into K is for each request to say
    resolve(roomy, SamplingConfig(), knobs)
    token = _overrides.set({**_overrides.get(), **knobs})
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a generator that is closed in another context, where nothing was set
            _overrides.reset(token)


def without_synonyms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of this project."""
    values = dict(values)
    if "max_new_tokens" in values:
        if values.get("max_tokens") is not None:
            raise ConfigError("max_new_tokens is a synonym of max_tokens: give one of them")
        values["max_tokens"] = values.pop("max_new_tokens")
    return values


def overridden() -> Mapping[str, Any]:
    """What the `overrides` blocks around the caller set."""
    return _overrides.get()


_ALSO_KNOWN_AS = {
    "entropy_threshold": "theta",
    "fly_entropy_threshold": "theta",
    "fly_window_size": "window",
    "k": "num_speculative_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_assistant_tokens": "num_speculative_tokens",
    "num_draft_tokens": "num_speculative_tokens",
    "num_predict": "max_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "strict": "lossless",
    "w": "window",
    "win_len": "window",
    "window_size": "window",
}
"""What other tools call these settings; used for suggestions only."""


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a `ConfigError` that suggests the nearest known name for the first unknown one."""
    known = list(known)
    for name in given:
        if name not in known:
            close = [_ALSO_KNOWN_AS.get(name.lower(), "")]
            if close[0] not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"unknown setting {name!r}: {hint}Known settings are {', '.join(sorted(known))}")


def _number(name: str, value: object, *, low: float, high: float = math.inf, infinite: bool = False) -> None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fine or (value == math.inf and not infinite):
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise ConfigError(f"{name} must be a number of at least {low:g}{upper}, got {value!r}")


def _integer(name: str, value: object, *, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
