"""One request on the worker thread: a prompt becomes ids, rounds become events, the last one carries the result."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fly_llm.config import DEFAULT_MAX_TOKENS, FLyConfig, SamplingConfig
from fly_llm.decoding.decode import decode
from fly_llm.decoding.sampling import Sampler
from fly_llm.decoding.verify import Rule
from fly_llm.drafters.base import Drafter, DraftRequest
from fly_llm.drafters.lookup import LookupDrafter
from fly_llm.drafters.model import ModelDrafter
from fly_llm.errors import ConfigError, ContextOverflowError, PromptError
from fly_llm.models.cached_model import CachedModel
from fly_llm.models.registry import Pair
from fly_llm.text.chat import encode_text, render_chat
from fly_llm.text.transcript import Transcript
from fly_llm.types import Event, FinishReason, Relaxation, Result, Round, Stats, Usage


def encode(tokenizer: Any, vocab_size: int, prompt: str | list[Any], template: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt: a text, token ids, or chat messages (which `template` options go with).

    Raises:
        PromptError: it cannot be rendered, or holds an id the target does not have.
    """
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt)
    if isinstance(prompt[0], Mapping):
        options = {name: value for name, value in template.items() if name != "chat_template_kwargs"}
        return render_chat(tokenizer, prompt, template_kwargs=template.get("chat_template_kwargs"), **options)
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise PromptError(f"token id {token} is not in the target's vocabulary of {vocab_size} ids")
    return prompt


def run(
    pair: Pair, prompt: list[int], fly: FLyConfig, sampling: SamplingConfig, cancelled: Callable[[], bool]
) -> Iterator[Event]:
    """Run one request to its end, or until `cancelled` says so.

    Yields:
        An event per round, then one that carries the result; nothing more once cancelled.

    Raises:
        ConfigError: a setting does not fit these models.
        ContextOverflowError: the prompt leaves no room; raised before anything is computed.
    """
    target = pair.target
    max_tokens = _budget(len(prompt), target.context_window, sampling.max_tokens)
    seed = _seed(sampling)
    eos_ids = _end_ids(target, sampling)
    drafting = _drafting(pair, fly)
    cache = CachedModel(target.model, max_length=target.context_window, rollback=fly.num_speculative_tokens > 0)
    _check_bias(sampling, cache.vocab_size)
    drafter, draft_cache = _drafter(pair, drafting, cache.vocab_size) if fly.num_speculative_tokens else (None, None)
    settings = _settings(pair, fly, sampling, drafting=drafting, max_tokens=max_tokens, seed=seed)
    answer = _Answer(target.tokenizer, Transcript(target.tokenizer, sampling.stop, fly.strict_prefix), settings)
    pasts = _Pasts(pair, prompt, fly)
    try:
        pasts.resume("target", cache)
        if drafter is not None:
            draft_seed = random.Random(f"draft {seed}").getrandbits(62)
            cached = pasts.resume("draft", draft_cache)
            drafter.start(DraftRequest(sampling, draft_seed, eos_ids, cancelled, cached))
        for round_ in decode(
            cache,
            drafter,
            prompt,
            sampler=Sampler(sampling, seed or 0, cache.vocab_size),
            max_tokens=max_tokens,
            num_speculative_tokens=fly.num_speculative_tokens,
            rule=Rule(
                fly.theta, fly.effective_window, fly.entropy, fly.relax_lookup, target.eos_ids | target.special_ids
            ),
            eos_ids=eos_ids,
            stats=answer.stats,
            cut=answer.transcript.cut,
            exact=answer.transcript.exact,
            cancelled=cancelled,
        ):
            yield answer.add(round_)
            if round_.finish_reason is not None:
                yield answer.finish(round_.finish_reason)
    except Exception:
        pasts.close()  # a forward that failed may have left half of itself in a cache
        raise
    finally:
        pasts.keep("target", cache, [*prompt, *answer.token_ids])
        if isinstance(drafter, ModelDrafter):
            pasts.keep("draft", draft_cache, drafter.cached)
        cache.reset()
        if drafter is not None:
            drafter.close()


class _Pasts:
    """The caches of earlier requests that this one goes on from, and those it leaves."""

    def __init__(self, pair: Pair, prompt: list[int], fly: FLyConfig) -> None:
        self._store, self._prompt, self._limit = pair.prefixes, prompt, fly.prefix_cache_bytes
        self._rollback = fly.num_speculative_tokens > 0

    def resume(self, role: str, cache: CachedModel | None) -> Sequence[int]:
        """Fill an empty cache with what it can have of the prompt but its last token. Returns the tokens it holds."""
        found = self._store.take((role, self._rollback), self._prompt) if cache and self._limit else None
        if cache is None or found is None:
            return ()
        cache.attach(*found)
        return self._prompt[: cache.length]

    def keep(self, role: str, cache: CachedModel | None, ids: Sequence[int]) -> None:
        """Keep a cache of the first tokens of `ids`."""
        past = cache.detach() if cache and self._limit and cache.length <= len(ids) else None
        if past is not None:
            self._store.put(
                (role, self._rollback), ids[: past.length], past, prompt_length=len(self._prompt), limit=self._limit
            )

    def close(self) -> None:
        """Keep nothing from now on."""
        self._limit = 0


class _Answer:
    """What has been committed so far in one request."""

    def __init__(self, tokenizer: Any, transcript: Transcript, settings: dict[str, Any]) -> None:
        self.transcript = transcript
        self.stats = Stats()
        self._tokenizer = tokenizer
        self._settings = settings
        self._ids: list[int] = []
        self._relaxed: list[tuple[int, int]] = []  # position, the target's own token
        self._texts: list[str] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens committed so far."""
        return self._ids

    def add(self, round_: Round) -> Event:
        """Take a round, whose tokens the transcript has seen already."""
        positions = [len(self._ids) + i for i in round_.relaxed]
        self.transcript.mark(positions)
        self._relaxed.extend(zip(positions, round_.overruled, strict=True))
        self._ids.extend(round_.token_ids)
        text, spans = self.transcript.take()
        self._texts.append(text)
        return Event(text, round_.token_ids, round_.relaxed, spans, round_)

    def finish(self, reason: FinishReason) -> Event:
        """Release what is held, and sum up."""
        self.transcript.finish()
        text, spans = self.transcript.take()
        self._texts.append(text)
        whole = "".join(self._texts)
        result = Result(
            text=whole,
            token_ids=tuple(self._ids),
            finish_reason=reason,
            usage=Usage(self.stats.num_prompt_tokens, len(self._ids), self.stats.num_cached_tokens),
            stats=self.stats,
            relaxations=tuple(self._relaxation(whole, position, own) for position, own in self._relaxed),
            settings=self._settings,
        )
        return Event(text, relaxed_spans=spans, result=result)

    def _relaxation(self, text: str, position: int, own: int) -> Relaxation:
        start, end = self.transcript.span(position)
        own_text = self._tokenizer.decode([own])
        return Relaxation(position, self._ids[position], own, start, end, text[start:end], own_text)


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


def _drafter(pair: Pair, drafting: str, vocab_size: int) -> tuple[Drafter, CachedModel | None]:
    """A drafter, and the draft model's cache if it has one."""
    if drafting == "lookup" or pair.draft is None:
        return LookupDrafter(), None
    draft = CachedModel(pair.draft.model, max_length=pair.draft.context_window, vocab_size=vocab_size)
    return ModelDrafter(draft, LookupDrafter() if drafting == "nested" else None), draft


def _budget(prompt_tokens: int, context_window: int | None, max_tokens: int | None) -> int:
    """`max_tokens` capped to the room that is left. Raises `ContextOverflowError` if there is none."""
    wanted = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if context_window is None:
        return wanted
    if prompt_tokens >= context_window:
        raise ContextOverflowError(prompt_tokens, context_window)
    return min(wanted, context_window - prompt_tokens)


def _seed(sampling: SamplingConfig) -> int | None:
    """The seed in force; drawn if none was given and one is needed, so that it can be reported."""
    if sampling.seed is None and not sampling.is_greedy:
        return secrets.randbits(31)
    return sampling.seed


def _end_ids(target: Any, sampling: SamplingConfig) -> frozenset[int]:
    """End-of-sequence ids, and the ids of stop strings that are one special or added token (these leave no text)."""
    added = target.tokenizer.added_tokens_decoder if sampling.stop else {}
    ids = {token.content: number for number, token in added.items()}
    ends = frozenset(ids[text] for text in sampling.stop if text in ids)
    return ends if sampling.ignore_eos else target.eos_ids | ends


def _check_bias(sampling: SamplingConfig, vocab_size: int) -> None:
    wrong = [token for token in sampling.logit_bias or () if token >= vocab_size]
    if wrong:
        raise ConfigError(f"logit_bias names token {wrong[0]}, but the target's vocabulary has {vocab_size} ids")


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
        "prefix_cache_bytes": fly.prefix_cache_bytes,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in (sampling.logit_bias or {}).items()} or None,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop),
        "seed": seed,
    }
