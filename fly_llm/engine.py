"""`FLyEngine`: prompts in, committed text out. The one public class of the core."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fly_llm.config import KNOBS, FLyConfig, SamplingConfig, check_names, resolve
from fly_llm.errors import ConfigError, ContextOverflowError, PromptError
from fly_llm.models.registry import Handle, ModelSpec, Pair
from fly_llm.stream import EventStream, Request, result_async, stream_async
from fly_llm.types import Event, Result, Stats, Usage

log = logging.getLogger("fly_llm")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text to complete as it stands, token ids, or chat messages (which go through the chat template)."""

DEFAULT_MAX_TOKENS = 1024
TEMPLATE_OPTIONS = ("tools", "documents", "chat_template_kwargs")


class FLyEngine:
    """Generates text with a target model, sped up by a drafter, and says what that changed.

    Make one with `from_pretrained`, which loads nothing; weights are loaded by the first request, shared with every
    engine of the same models and options in this process, and freed when the last of these engines is closed.

    Requests may come from any thread or task. They run to completion one after the other, in the order they arrive.
    """

    def __init__(self, target: ModelSpec, draft: ModelSpec | None, *, fly: FLyConfig, sampling: SamplingConfig) -> None:
        self._specs = (target, draft)
        self._handle = Handle(target, draft)
        self.fly = fly
        self.sampling = sampling

    @classmethod
    def from_pretrained(
        cls,
        target: Any = None,
        draft: Any = None,
        *,
        fly: FLyConfig | None = None,
        sampling: SamplingConfig | None = None,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        chat_template: str | Path | None = None,
        dtype: Any = "auto",
        device_map: Any = None,
        draft_device: Any = None,
        quantization_config: Any = None,
        draft_quantization_config: Any = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        local_files_only: bool = False,
        **knobs: Any,
    ) -> FLyEngine:
        """Make an engine. Takes milliseconds; nothing is loaded, and a missing model shows at the first request.

        Args:
            target: hub name, local folder, GGUF file or loaded `PreTrainedModel`; None is the bundled default.
            draft: the same for the draft model, which must share the target's tokenizer. None drafts by prompt lookup
                alone; a draft model is itself drafted for by prompt lookup.
            fly: FLy settings; single ones can be given by name as well (`theta=0.2`).
            sampling: sampling settings; single ones by name (`temperature=0.7`).
            tokenizer: instead of the target's own; needed for a loaded model.
            draft_tokenizer: the same for the draft model; a loaded draft model takes the target's by default.
            chat_template: a Jinja template, or the path of one, instead of the tokenizer's.
            dtype: "auto" (the checkpoint's), "bfloat16", "float16", "float32", or a torch dtype.
            device_map: None is cuda, else mps, else cpu; "auto" shards; or as in transformers.
            draft_device: where the draft model goes, if not where `device_map` says.
            quantization_config: as in transformers, for the target.
            draft_quantization_config: the same for the draft model.
            revision: branch, tag or commit of a hub target.
            draft_revision: the same for the draft model.
            token: hub token.
            trust_remote_code: run code that comes with the checkpoints; off unless asked for.
            attn_implementation: as in transformers.
            local_files_only: never ask the hub.
            **knobs: any field of `FLyConfig` and `SamplingConfig`.

        Raises:
            ConfigError: an unknown name or a value out of range.
        """
        from fly_llm.models.loading import LoadOptions

        settings = resolve(fly or FLyConfig(), sampling or SamplingConfig(), knobs)
        shared = {
            "dtype": dtype,
            "token": token,
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
            "local_files_only": local_files_only,
        }
        options = LoadOptions(
            device_map=device_map, quantization_config=quantization_config, revision=revision, **shared
        )
        target_spec = ModelSpec(target, options, tokenizer, chat_template)
        draft_spec = None
        if draft is not None:
            if draft_tokenizer is None and not isinstance(draft, (str, Path)):
                draft_tokenizer = tokenizer
            options = LoadOptions(
                device_map=draft_device if draft_device is not None else device_map,
                quantization_config=draft_quantization_config,
                revision=draft_revision,
                **shared,
            )
            draft_spec = ModelSpec(draft, options, draft_tokenizer)
        return cls(target_spec, draft_spec, fly=settings[0], sampling=settings[1])

    def generate(self, prompt: Prompt, **overrides: Any) -> Result:
        """Answer a prompt.

        Args:
            prompt: text to complete, token ids, or chat messages.
            **overrides: any field of `FLyConfig` and `SamplingConfig`, for this call; with messages also `tools`,
                `documents` and `chat_template_kwargs`.

        Raises:
            ConfigError: an unknown name (the nearest is suggested) or a value out of range.
            PromptError: the prompt is empty or cannot be rendered.
            ContextOverflowError: it leaves no room for an answer.
            ModelLoadError: the first request of this engine could not load the models.
            EngineClosedError: the engine has been closed.
        """
        return self.stream(prompt, **overrides).result()

    def stream(self, prompt: Prompt, **overrides: Any) -> EventStream:
        """Answer a prompt piece by piece; see `generate`. Only committed text is streamed.

        Returns:
            An iterator of events. Closing or dropping it cancels the request within one forward.
        """
        return EventStream(self._starter(prompt, overrides))

    async def agenerate(self, prompt: Prompt, **overrides: Any) -> Result:
        """`generate` without blocking the event loop; cancelling the task cancels the request within one forward."""
        return await result_async(self._starter(prompt, overrides))

    def astream(self, prompt: Prompt, **overrides: Any) -> AsyncIterator[Event]:
        """`stream` without blocking the event loop."""
        return stream_async(self._starter(prompt, overrides))

    def count_tokens(self, prompt: Prompt, **template_options: Any) -> int:
        """How many tokens the prompt has once rendered. Loads the models if they are not loaded."""
        return len(_encode(self._handle.models.pair(), _checked(prompt), template_options))

    def load(self) -> FLyEngine:
        """Load the weights now instead of at the first request. Raises `ModelLoadError`."""
        self._handle.models.pair()
        return self

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Loads the models if they are not loaded."""
        return self._handle.models.pair().target.tokenizer

    def close(self) -> None:
        """Release this handle; the weights are freed with the last one that shares them."""
        self._handle.close()

    def __enter__(self) -> FLyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        for spec in self._specs:
            if spec is not None and spec.is_live:
                raise TypeError(
                    "an engine made from loaded objects cannot be pickled or copied: make it from names or paths, or "
                    "call from_pretrained again with the objects on the other side"
                )
        return (partial(FLyEngine, fly=self.fly, sampling=self.sampling), self._specs)

    def _starter(self, prompt: Prompt, overrides: Mapping[str, Any]) -> partial[None]:
        """Check what can be checked without the models, and prepare the job for the worker thread."""
        check_names(overrides, (*KNOBS, *TEMPLATE_OPTIONS))
        template = {name: overrides[name] for name in TEMPLATE_OPTIONS if name in overrides}
        knobs = {name: value for name, value in overrides.items() if name not in TEMPLATE_OPTIONS}
        fly, sampling = resolve(self.fly, self.sampling, knobs)
        checked = _checked(prompt)
        if template and not (isinstance(checked, list) and isinstance(checked[0], Mapping)):
            raise ConfigError(f"{', '.join(template)}: only chat messages go through a template, not text or token ids")
        models = self._handle.models

        def job(request: Request) -> None:
            try:
                if not request.cancelled():
                    pair = models.pair()
                    ids = _encode(pair, checked, template)
                    for event in _events(pair, ids, fly, sampling, lambda: request.cancelled() or models.exiting):
                        request.deliver(event)
                request.deliver(None)
            except BaseException as error:
                request.deliver(error.with_traceback(None) if isinstance(error, ConfigError) else error)

        return partial(_submit, models.submit, job)


def _submit(submit: Any, job: Any, request: Request) -> None:
    submit(partial(job, request))


def _checked(prompt: Any) -> str | list[Any]:
    """The prompt as text, a list of ids or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        items = list(prompt)
        if not items:
            raise PromptError("the prompt is an empty list: give at least one message or token id")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, Mapping) for item in items):
            return items
    raise PromptError(
        "a prompt is a str, a list of token ids, or a list of messages like {'role': 'user', 'content': '...'}, "
        f"got {type(prompt).__name__}: {str(prompt)[:80]!r}"
    )


def _encode(pair: Pair, prompt: str | list[Any], template: Mapping[str, Any]) -> list[int]:
    """Token ids of a checked prompt."""
    from fly_llm.text.chat import encode_text, render_chat

    tokenizer = pair.target.tokenizer
    if isinstance(prompt, str):
        with pair.tokenizer_lock:
            return encode_text(tokenizer, prompt)
    if isinstance(prompt[0], Mapping):
        options = {name: value for name, value in template.items() if name != "chat_template_kwargs"}
        with pair.tokenizer_lock:
            return render_chat(tokenizer, prompt, template_kwargs=template.get("chat_template_kwargs"), **options)
    size = pair.target.model.config.get_text_config(decoder=True).vocab_size
    for token in prompt:
        if not 0 <= token < size:
            raise PromptError(f"token id {token} is not in the target's vocabulary of {size} ids")
    return prompt


def _events(
    pair: Pair, prompt: list[int], fly: FLyConfig, sampling: SamplingConfig, cancelled: Callable[[], bool]
) -> Iterator[Event]:
    """Run one request on the worker thread."""
    from fly_llm.decoding.decode import decode
    from fly_llm.decoding.sampling import Sampler
    from fly_llm.decoding.verify import Rule
    from fly_llm.drafters.base import DraftRequest
    from fly_llm.models.cached_model import CachedModel
    from fly_llm.text.transcript import Transcript

    target = pair.target
    max_tokens = _budget(len(prompt), target.context_window, sampling.max_tokens)
    seed = _seed(sampling)
    eos_ids = _end_ids(target, sampling)
    cache = CachedModel(target.model, max_length=target.context_window, rollback=fly.num_speculative_tokens > 0)
    _check_bias(sampling, cache.vocab_size)
    drafting = _drafting(pair, fly)
    drafter = _drafter(pair, drafting, cache.vocab_size) if fly.num_speculative_tokens else None
    transcript = Transcript(target.tokenizer, sampling.stop, fly.strict_prefix)
    rule = Rule(fly.theta, fly.effective_window, fly.entropy, fly.relax_lookup, target.eos_ids | target.special_ids)
    stats = Stats()
    ids: list[int] = []
    relaxed: list[int] = []
    overruled: list[int] = []
    texts: list[str] = []
    spans: list[tuple[int, int]] = []

    def piece() -> tuple[str, tuple[tuple[int, int], ...]]:
        text, marked = transcript.take()
        start = sum(map(len, texts))
        spans.extend((a + start, b + start) for a, b in marked)
        texts.append(text)
        return text, marked

    try:
        if drafter is not None:
            draft_seed = random.Random(f"draft {seed}").getrandbits(62)
            drafter.start(DraftRequest(sampling, draft_seed, eos_ids, cancelled))
        for round_ in decode(
            cache,
            drafter,
            prompt,
            sampler=Sampler(sampling, seed or 0, cache.vocab_size),
            max_tokens=max_tokens,
            num_speculative_tokens=fly.num_speculative_tokens,
            rule=rule,
            eos_ids=eos_ids,
            stats=stats,
            cut=transcript.cut,
            exact=transcript.exact,
            cancelled=cancelled,
        ):
            positions = [len(ids) + i for i in round_.relaxed]
            transcript.mark(positions)
            relaxed.extend(positions)
            overruled.extend(round_.overruled)
            ids.extend(round_.token_ids)
            text, marked = piece()
            yield Event(text, round_.token_ids, round_.relaxed, marked, round_)
            if round_.finish_reason is None:
                continue
            transcript.finish()
            text, marked = piece()
            result = Result(
                text="".join(texts),
                token_ids=tuple(ids),
                finish_reason=round_.finish_reason,
                usage=Usage(len(prompt), len(ids)),
                stats=stats,
                relaxed=tuple(relaxed),
                overruled=tuple(overruled),
                relaxed_spans=tuple(_joined(spans)),
                settings=_settings(pair, fly, sampling, drafting=drafting, max_tokens=max_tokens, seed=seed),
            )
            yield Event(text, relaxed_spans=marked, result=result)
    finally:
        cache.reset()
        if drafter is not None:
            drafter.close()


def _drafting(pair: Pair, fly: FLyConfig) -> str:
    """How this request is drafted for. Raises `ConfigError` if that takes a draft model and there is none."""
    if fly.drafting == "auto":
        return "nested" if pair.draft else "lookup"
    if fly.drafting != "lookup" and pair.draft is None:
        raise ConfigError(
            f"drafting={fly.drafting!r} needs a draft model and this engine has none: give one (draft=), or use "
            "drafting='lookup'"
        )
    return fly.drafting


def _drafter(pair: Pair, drafting: str, vocab_size: int) -> Any:
    from fly_llm.drafters.lookup import LookupDrafter
    from fly_llm.drafters.model import ModelDrafter
    from fly_llm.models.cached_model import CachedModel

    if drafting == "lookup" or pair.draft is None:
        return LookupDrafter()
    draft = CachedModel(pair.draft.model, max_length=pair.draft.context_window, vocab_size=vocab_size)
    return ModelDrafter(draft, LookupDrafter() if drafting == "nested" else None)


def _budget(prompt_tokens: int, context_window: int | None, max_tokens: int | None) -> int:
    """`max_tokens` capped to the room that is left. Raises `ContextOverflowError` if there is none."""
    wanted = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if context_window is None:
        return wanted
    if prompt_tokens >= context_window:
        raise ContextOverflowError(prompt_tokens, context_window)
    return min(wanted, context_window - prompt_tokens)


def _seed(sampling: SamplingConfig) -> int | None:
    """The seed in force; drawn if none was given, so that it can be reported; None for greedy decoding."""
    if sampling.temperature == 0.0:
        return None
    return sampling.seed if sampling.seed is not None else secrets.randbits(31)


def _end_ids(target: Any, sampling: SamplingConfig) -> frozenset[int]:
    """End-of-sequence ids, and the ids of stop strings that are one special or added token (these leave no text)."""
    stops = {target.tokenizer.convert_tokens_to_ids(text) for text in sampling.stop}
    ends = frozenset(stops & target.special_ids)
    return ends if sampling.ignore_eos else target.eos_ids | ends


def _check_bias(sampling: SamplingConfig, vocab_size: int) -> None:
    wrong = [token for token in sampling.logit_bias or () if token >= vocab_size]
    if wrong:
        raise ConfigError(f"logit_bias names token {wrong[0]}, but the target's vocabulary has {vocab_size} ids")


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch joined into one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _settings(
    pair: Pair, fly: FLyConfig, sampling: SamplingConfig, *, drafting: str, max_tokens: int, seed: int | None
) -> dict[str, Any]:
    """The values in force, JSON-able."""
    return {
        "model": pair.target.name,
        "draft_model": pair.draft.name if pair.draft else None,
        "dtype": str(pair.target.model.dtype).removeprefix("torch."),
        "theta": fly.theta if fly.theta != float("inf") else "inf",
        "window": fly.effective_window,
        "num_speculative_tokens": fly.num_speculative_tokens,
        "entropy": fly.entropy,
        "lossless": not fly.relaxes or (drafting == "lookup" and not fly.relax_lookup),
        "strict_prefix": fly.strict_prefix,
        "drafting": drafting if fly.num_speculative_tokens else None,
        "relax_lookup": fly.relax_lookup,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop),
        "seed": seed,
    }
