"""One request on the worker thread: a prompt becomes ids, rounds become events, the last one carries the result."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fly_llm.answer import Answer, transcript_of
from fly_llm.config import DEFAULT_MAX_TOKENS, FLyConfig, SamplingConfig
from fly_llm.decoding.decode import decode
from fly_llm.decoding.sampling import Sampler
from fly_llm.decoding.verify import Rule
from fly_llm.drafters.base import Drafter, DraftRequest
from fly_llm.drafters.guided import GuidedDrafter
from fly_llm.drafters.lookup import LookupDrafter
from fly_llm.drafters.model import ModelDrafter
from fly_llm.errors import ConfigError, ContextOverflowError, PromptError
from fly_llm.models.cached_model import CachedModel, fingerprint
from fly_llm.models.registry import Pair
from fly_llm.text.chat import encode_text, render_chat
from fly_llm.text.constrain import Constraint
from fly_llm.text.families import family_of
from fly_llm.text.messages import normalise
from fly_llm.text.tools import FREE, Structure, explained
from fly_llm.text.transcript import Transcript
from fly_llm.types import Event


def encode(tokenizer: Any, vocab_size: int, prompt: str | list[Any], template: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt: a text, token ids, or chat messages (which `template` options go with).

    A chat template that has no place for tools is told of them in a system message, and of calls and results as text.

    Raises:
        PromptError: it cannot be rendered, or holds an id the target does not have.
    """
    if isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt)
    elif isinstance(prompt[0], Mapping):
        options = {name: value for name, value in template.items() if name != "chat_template_kwargs"}
        if not family_of(tokenizer).renders_tools:
            prompt = explained(normalise(prompt), options.pop("tools", None) or ())
        ids = render_chat(tokenizer, prompt, template_kwargs=template.get("chat_template_kwargs"), **options)
    else:
        ids = prompt
    for token in ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"token id {token} is not in the target's vocabulary of {vocab_size} ids")
    return ids


def run(
    pair: Pair,
    prompt: list[int],
    fly: FLyConfig,
    sampling: SamplingConfig,
    cancelled: Callable[[], bool],
    structure: Structure = FREE,
    *,
    is_chat: bool = False,
) -> Iterator[Event]:
    """Run one request to its end, or until `cancelled` says so.

    Args:
        pair: the loaded models; this runs on their thread.
        prompt: token ids.
        fly: what may be relaxed, and how much is drafted.
        sampling: how tokens are chosen, and when the answer ends.
        cancelled: read before every forward.
        structure: tools, and the form the answer must have.
        is_chat: the prompt is a chat, whose answer may hold reasoning and tool calls.

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
    settings = _settings(pair, fly, sampling, drafting=drafting, max_tokens=max_tokens, seed=seed)
    transcript, constraint = transcript_of(pair, prompt, fly, sampling, structure, is_chat=is_chat)
    draft = _draft_model(pair, drafting, cache.vocab_size) if fly.num_speculative_tokens else None
    drafter: Drafter | None = (draft or LookupDrafter()) if fly.num_speculative_tokens else None
    if constraint is not None and drafter is not None:
        drafter = GuidedDrafter(drafter, constraint)
    answer = Answer(target.tokenizer, transcript, settings)
    pasts = _Pasts(pair, prompt, fly)
    try:
        pasts.resume("target", cache)
        if drafter is not None:
            draft_seed = random.Random(f"draft {seed}").getrandbits(62)
            cached = pasts.resume("draft", draft.model) if draft is not None else ()
            mask = constraint.mask if constraint is not None else None
            drafter.start(DraftRequest(sampling, draft_seed, eos_ids, cancelled, cached, mask))
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
            cut=partial(_commit, transcript, constraint),
            exact=transcript.exact,
            mask_logits=partial(constraint.mask, ()) if constraint is not None else None,
            cancelled=cancelled,
        ):
            yield answer.add(round_)
            if round_.finish_reason is not None:
                yield answer.finish(round_.finish_reason)
    except GeneratorExit:
        raise
    except BaseException:
        pasts.close()  # a forward that failed may have left half of itself in a cache
        raise
    finally:
        pasts.keep("target", cache, [*prompt, *answer.token_ids])
        if draft is not None:
            pasts.keep("draft", draft.model, draft.cached)
        cache.reset()
        if drafter is not None:
            drafter.close()


def _commit(transcript: Transcript, constraint: Constraint | None, tokens: Sequence[int]) -> int | None:
    """Tell the transcript and the grammar of a round. Returns where the answer ends in it, if it does."""
    keep = transcript.cut(tokens)
    if constraint is not None:
        constraint.commit(tokens if keep is None else tokens[:keep])
    return keep


class _Pasts:
    """The caches of earlier requests that this one goes on from, and those it leaves."""

    def __init__(self, pair: Pair, prompt: list[int], fly: FLyConfig) -> None:
        self._store, self._prompt, self._limit = pair.prefixes, prompt, fly.prefix_cache_bytes
        self._rollback = fly.num_speculative_tokens > 0
        self._store.check(
            tuple(fingerprint(loaded.model) for loaded in (pair.target, pair.draft) if loaded is not None)
        )

    def resume(self, role: str, cache: CachedModel) -> Sequence[int]:
        """Fill an empty cache with what it can have of the prompt but its last token. Returns the tokens it holds."""
        kind = self._kind(role, cache, len(self._prompt) - 1)
        found = self._store.take(kind, self._prompt) if self._limit else None
        if found is None:
            return ()
        cache.attach(*found)
        return self._prompt[: cache.length]

    def keep(self, role: str, cache: CachedModel, ids: Sequence[int]) -> None:
        """Keep a cache of the first tokens of `ids`."""
        past = cache.detach() if self._limit and cache.length <= len(ids) else None
        if past is not None:
            kind = self._kind(role, cache, past.length)
            self._store.put(kind, ids[: past.length], past, prompt_length=len(self._prompt), limit=self._limit)
        elif self._limit:
            self._store.trim(self._limit)

    def _kind(self, role: str, cache: CachedModel, length: int) -> Hashable:
        """Caches are gone on from only by requests of the same kind."""
        return role, self._rollback, cache.switch is not None and length > cache.switch

    def close(self) -> None:
        """Keep nothing from now on."""
        self._limit = 0


def _drafting(pair: Pair, fly: FLyConfig) -> str:
    """How this request is drafted for. Raises `ConfigError` if that takes a draft model and there is none."""
    if fly.drafting == "auto":
        return "nested" if pair.draft else "lookup"
    if fly.drafting != "lookup" and pair.draft is None:
        raise ConfigError(
            f"drafting={fly.drafting!r} needs a draft model and there is none: give one (draft=, draft_model=), or use "
            "drafting='lookup'"
        )
    return fly.drafting


def _draft_model(pair: Pair, drafting: str, vocab_size: int) -> ModelDrafter[CachedModel] | None:
    """The draft model, itself drafted for or not; None for prompt lookup alone."""
    if drafting == "lookup" or pair.draft is None:
        return None
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
        "strict_zones": list(fly.strict_zones),
        "drafting": drafting if fly.num_speculative_tokens else None,
        "relax_lookup": fly.relax_lookup,
        "prefix_cache_bytes": fly.prefix_cache_bytes,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {
            str(token): bias if bias > float("-inf") else "-inf" for token, bias in (sampling.logit_bias or {}).items()
        }
        or None,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop),
        "seed": seed,
    }
