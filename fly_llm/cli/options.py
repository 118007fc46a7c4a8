"""The options every request takes, once for all commands, and what they mean to the engine."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fly_llm.cli.output import reporting
from fly_llm.config import KNOBS, FLyConfig, SamplingConfig, resolve

if TYPE_CHECKING:
    from fly_llm.engine import FLyEngine

DEFAULT_MODEL = "default"
"""The name that stands for the bundled default model."""

_FLY = FLyConfig()
_SAMPLING = SamplingConfig()
_option = typer.Option
_in_models = functools.partial(_option, rich_help_panel="Models")
_in_fly = functools.partial(_option, rich_help_panel="Speculation")
_in_sampling = functools.partial(_option, rich_help_panel="Sampling")

Dtype = Annotated[str, _in_models(metavar="NAME", help="auto (the checkpoint's), bfloat16, float16 or float32.")]
Device = Annotated[
    str | None,
    _in_models(
        metavar="NAME", help="cpu, cuda, cuda:1, mps, or auto to shard.", show_default="cuda, else mps, else cpu"
    ),
]
TrustRemoteCode = Annotated[bool, _in_models("--trust-remote-code", help="Run code that comes with the checkpoint.")]
LocalFilesOnly = Annotated[bool, _in_models("--local-files-only", help="Never ask the hub.")]
Verbose = Annotated[
    bool, _option("--verbose", "-v", help="Show the log on stderr; FLY_LLM_LOG=debug (or info, error) does so as well.")
]


@dataclass(frozen=True)
class Options:
    """What to load, how to draft, how to sample, what to show; each field is one option."""

    model: Annotated[
        str, _in_models("--model", "-m", metavar="NAME", help="Target: hub name, folder, GGUF file, or default.")
    ] = DEFAULT_MODEL
    draft: Annotated[
        str | None,
        _in_models(
            "--draft",
            "-d",
            metavar="NAME",
            help="Draft model; must share the target's tokenizer.",
            show_default="none: copies from the text so far",
        ),
    ] = None
    dtype: Dtype = "auto"
    device: Device = None
    draft_device: Annotated[
        str | None, _in_models(metavar="NAME", help="Device of the draft model.", show_default="as --device")
    ] = None
    trust_remote_code: TrustRemoteCode = False
    local_files_only: LocalFilesOnly = False

    theta: Annotated[
        float, _in_fly(help="A mismatch may be kept only where the target's entropy is at least this; inf is strict.")
    ] = _FLY.theta
    window: Annotated[
        int | None,
        _in_fly(help="Tokens after a mismatch that must all match for it to be kept.", show_default="min(6, k - 1)"),
    ] = _FLY.window
    num_speculative_tokens: Annotated[
        int, _in_fly("--num-speculative-tokens", "-k", help="Most tokens drafted per round; 0 decodes plainly.")
    ] = _FLY.num_speculative_tokens
    entropy: Annotated[
        str,
        _in_fly(metavar="KIND", help="What theta is compared with: top3 (nats, 0 to 1.0986) or normalized (0 to 1)."),
    ] = _FLY.entropy
    lossless: Annotated[
        bool, _in_fly("--lossless", help="Keep no mismatch: the text is what the target alone would write.")
    ] = _FLY.lossless
    drafting: Annotated[
        str,
        _in_fly(metavar="KIND", help="auto, lookup (copy from the text so far), model, or nested (both)."),
    ] = _FLY.drafting
    strict_prefix: Annotated[int, _in_fly(help="Keep no mismatch among this many first tokens.")] = _FLY.strict_prefix
    strict_zones: Annotated[
        list[str] | None,
        _in_fly(
            metavar="ZONE",
            help="Keep no mismatch in tool, json, grammar, code or reasoning; may be given several times.",
            show_default="tool json grammar",
        ),
    ] = None
    relax_lookup: Annotated[bool, _in_fly(help="Whether mismatches in looked-up drafts may be kept as well.")] = (
        _FLY.relax_lookup
    )
    prefix_cache_bytes: Annotated[
        int, _in_fly(help="Most bytes of finished requests' caches kept for prompts that begin alike; 0 keeps none.")
    ] = _FLY.prefix_cache_bytes

    temperature: Annotated[float, _in_sampling(help="0 always takes the likeliest token.")] = _SAMPLING.temperature
    top_p: Annotated[float, _in_sampling(help="Nucleus sampling; 1 is off.")] = _SAMPLING.top_p
    top_k: Annotated[int, _in_sampling(help="Sample among the k likeliest tokens; 0 is off.")] = _SAMPLING.top_k
    min_p: Annotated[float, _in_sampling(help="Drop tokens less likely than this times the likeliest; 0 is off.")] = (
        _SAMPLING.min_p
    )
    repetition_penalty: Annotated[float, _in_sampling(help="Above 1 discourages tokens already there; 1 is off.")] = (
        _SAMPLING.repetition_penalty
    )
    max_tokens: Annotated[
        int | None, _in_sampling(help="Most new tokens.", show_default="1024, or the room left in the context")
    ] = _SAMPLING.max_tokens
    stop: Annotated[
        list[str] | None, _in_sampling(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None
    seed: Annotated[
        int | None, _in_sampling(help="Makes sampling repeatable.", show_default="drawn, and reported by --json")
    ] = _SAMPLING.seed
    ignore_eos: Annotated[bool, _in_sampling("--ignore-eos", help="Go on after an end-of-sequence token.")] = (
        _SAMPLING.ignore_eos
    )

    stats: Annotated[bool, _option(help="Show statistics of each answer on stderr.")] = True
    verbose: Verbose = False

    def knobs(self) -> dict[str, Any]:
        """The settings of a request by name, checked.

        Raises:
            ConfigError: a value is out of range.
        """
        knobs = {name: value for name, value in vars(self).items() if name in KNOBS}
        knobs["stop"] = tuple(self.stop or ())
        knobs["strict_zones"] = _FLY.strict_zones if self.strict_zones is None else tuple(self.strict_zones)
        resolve(_FLY, _SAMPLING, knobs)
        return knobs

    def engine(self) -> FLyEngine:
        """An engine whose models are loaded.

        Raises:
            ConfigError: a value is out of range; shows before anything is imported or loaded.
            ModelLoadError: a model cannot be loaded, or the two do not fit together.
        """
        knobs = self.knobs()
        from fly_llm.engine import FLyEngine

        return FLyEngine.from_pretrained(
            None if self.model == DEFAULT_MODEL else self.model,
            self.draft,
            dtype=self.dtype,
            device_map=self.device,
            draft_device=self.draft_device,
            trust_remote_code=self.trust_remote_code,
            local_files_only=self.local_files_only,
            **knobs,
        ).load()


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of `Options`, in place of its parameter `options`.

    The command runs inside `reporting`.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "options"
    ]
    hints = get_type_hints(Options, include_extras=True)
    names = [field.name for field in dataclasses.fields(Options)]
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(Options)
    ]

    def run(**given: Any) -> None:
        options = Options(**{name: given.pop(name) for name in names})
        with reporting(verbose=options.verbose):
            command(options=options, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return run
