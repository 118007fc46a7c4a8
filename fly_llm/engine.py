"""`FLyEngine`: prompts in, committed text out. The one public class of the core."""

from __future__ import annotations

import copy
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_llm.config import KNOBS, FLyConfig, SamplingConfig, check_names, overridden, resolve
from fly_llm.errors import ConfigError, FLyError, PromptError
from fly_llm.models.registry import Handle, ModelSpec, SharedModels
from fly_llm.stream import EventStream, Request, result_async, stream_async
from fly_llm.types import Event, Result

if TYPE_CHECKING:
    from fly_llm.models.facts import Facts

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text to complete as it stands, token ids, or chat messages (which go through the chat template)."""

TEMPLATE_OPTIONS = ("tools", "documents", "chat_template_kwargs")
STRUCTURE_OPTIONS = ("tool_choice", "parallel_tool_calls", "response_format")
REQUEST_OPTIONS = (*TEMPLATE_OPTIONS, *STRUCTURE_OPTIONS)


class FLyEngine:
    """Generates text with a target model, sped up by a drafter, and says what that changed.

    Make one with `from_pretrained`, which loads nothing; weights are loaded by the first request, shared with every
    engine of the same models and options in this process, and freed when the last of these engines is closed.

    Requests may come from any thread or task. They run to completion one after the other, in the order they arrive.
    """

    def __init__(self, target: ModelSpec, draft: ModelSpec | None, *, fly: FLyConfig, sampling: SamplingConfig) -> None:
        self._specs = (target, draft)
        self._handle = Handle(target, draft)
        self._facts: Facts | None = None
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
        from fly_llm.models.options import LoadOptions

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
            **overrides: any field of `FLyConfig` and `SamplingConfig`, for this call. `response_format`, the form the
                answer must have, in OpenAI's form: `{"type": "json_schema", "json_schema": {"schema": ...}}`,
                `{"type": "json_object"}`, or `"regex"`, `"choice"` or `"grammar"` (Lark). With messages also `tools`
                (in OpenAI's form), `tool_choice` ("auto", "none", "required" or a name), `parallel_tool_calls` (whether
                a forced answer may hold several), `documents` and `chat_template_kwargs`.

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
        from fly_llm.request import encode

        pair = self._handle.models.pair()
        with pair.lock:
            return len(encode(pair.tokenizer, pair.target.vocab_size, _checked(prompt), template_options))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it would be in a message, from any thread. Loads the models if they are not loaded."""
        pair = self._handle.models.pair()
        with pair.lock:
            ids: list[int] = pair.tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
            return ids

    def load(self) -> FLyEngine:
        """Load the weights now instead of at the first request. Raises `ModelLoadError`."""
        self._handle.models.pair()
        return self

    def facts(self, *, at_hand: bool = False) -> Facts | None:
        """Context window and chat template of the target, without loading weights.

        Args:
            at_hand: use only what takes milliseconds, and return None where that is not enough.

        Raises:
            ModelLoadError: the model is not there; not raised with `at_hand`.
        """
        from fly_llm.models.facts import glance, look, of_pair

        models = self._handle.models
        if models.is_loaded:
            return of_pair(models.pair().target)
        if self._facts is not None:
            return self._facts
        if not at_hand:
            self._facts = look(self._specs[0])
            return self._facts
        found = glance(self._specs[0])
        if found is not None and found.context_window is not None:  # else another file, or the config's class, may say
            self._facts = found
        return found

    @property
    def tokenizer(self) -> Any:
        """A copy of the target's tokenizer, for use in any one thread. Loads the models if they are not loaded."""
        return self._handle.models.pair().tokenizer

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._handle.closed

    def close(self) -> None:
        """Release this handle; the weights are freed with the last one that shares them."""
        self._handle.close()

    def __enter__(self) -> FLyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_live(self) -> bool:
        """Whether it was made from loaded objects, which can be neither pickled nor loaded again."""
        return any(spec is not None and spec.is_live for spec in self._specs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_live:
            raise TypeError(
                "an engine made from loaded objects cannot be pickled or copied: make it from names or paths, or "
                "call from_pretrained again with the objects on the other side"
            )
        return (partial(FLyEngine, fly=self.fly, sampling=self.sampling), self._specs)

    def _starter(self, prompt: Prompt, overrides: Mapping[str, Any]) -> Callable[[Request], None]:
        """Check what can be checked without the models. Returns what queues the request for the worker thread."""
        from fly_llm.text.tools import Structure

        check_names(overrides, (*KNOBS, *REQUEST_OPTIONS))
        structure = Structure.of(overrides)
        template = {name: overrides[name] for name in TEMPLATE_OPTIONS if name in overrides}
        if "tools" in template:
            template["tools"] = structure.visible_tools
        knobs = {**overridden(), **{name: overrides[name] for name in overrides if name in KNOBS}}
        fly, sampling = resolve(self.fly, self.sampling, knobs)
        checked = _checked(prompt)
        is_chat = isinstance(checked, list) and isinstance(checked[0], Mapping)
        if template and not is_chat:
            raise ConfigError(f"{', '.join(template)}: only chat messages go through a template, not text or token ids")
        models = self._handle.models

        def job(request: Request) -> None:
            from fly_llm.request import encode, run

            try:
                if not request.cancelled():
                    pair = models.pair()
                    ids = encode(pair.target.tokenizer, pair.target.vocab_size, checked, template)
                    stopped = partial(_stopped, request, models)
                    for event in run(pair, ids, fly, sampling, stopped, structure, is_chat=is_chat):
                        request.deliver(event)
                request.deliver(None)
            except BaseException as error:
                request.deliver(_detached(error))

        return lambda request: models.submit(partial(job, request))


def _stopped(request: Request, models: SharedModels) -> bool:
    """Whether nobody wants the rest, or the interpreter is going."""
    return request.cancelled() or models.exiting


def _detached(error: BaseException) -> BaseException:
    """The error without its frames, which would keep caches and models alive as long as somebody keeps the error.

    Where the error came from is added as a note to those nobody raised on purpose.
    """
    if not isinstance(error, FLyError):
        error.add_note("Raised on the engine's thread:\n" + "".join(traceback.format_tb(error.__traceback__)))
    links, seen = [error], set[int]()
    while links:  # errors behind it have frames of their own
        link = links.pop()
        if id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links.extend(behind for behind in (link.__cause__, link.__context__) if behind is not None)
    return error


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
            return copy.deepcopy(items)  # the request may wait, and the caller goes on with its list
    raise PromptError(
        "a prompt is a str, a list of token ids, or a list of messages like {'role': 'user', 'content': '...'}, "
        f"got {type(prompt).__name__}: {str(prompt)[:80]!r}"
    )
