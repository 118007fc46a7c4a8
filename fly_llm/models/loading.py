"""Models and tokenizers from a hub name, a local folder, a GGUF file or a live object.

One rule for each thing that is often surprising: a checkpoint's generation settings are not inherited (they are
logged), a dispatched or quantised model is never moved, a live model's weights are never touched, GGUF weights are
unpacked. Every failure is one `ModelLoadError` that says what to do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fly_llm.errors import ConfigError, ModelLoadError
from fly_llm.models import compatibility
from fly_llm.models.compatibility import ignored_generation_settings
from fly_llm.models.options import LoadOptions, fast_dtype, resolve_device
from fly_llm.models.sources import NOT_A_MODEL, Source, explained, resolve_source

logger = logging.getLogger("fly_llm")


@dataclass
class LoadedModel:
    """A model ready to decode, with what decoding needs to know about it.

    Attributes:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        eos_ids: every id that ends an answer.
        special_ids: special and added tokens, which are never relaxed.
        context_window: the most tokens it can hold; None if nothing says so.
        name: hub name, path, or class name of a live model.
        device: where its inputs go: the device of its embedding.
    """

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    context_window: int | None
    name: str
    device: torch.device

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padding included."""
        return int(compatibility.text_config(self.model.config).vocab_size)


def load_model(
    source: Any, options: LoadOptions | None = None, *, tokenizer: Any = None, chat_template: str | Path | None = None
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        source: hub name, local folder, GGUF file (a path, or `owner/repository/file.gguf`), or live `PreTrainedModel`.
        options: how to load it; for a live model they play no part.
        tokenizer: a tokenizer, or its name or folder, to use instead of the checkpoint's. Needed for live models.
        chat_template: a Jinja template, or the path of one, to use instead of the tokenizer's.

    Raises:
        ModelLoadError: something is missing, damaged, unreachable or no causal language model; the message says what.
        ConfigError: a live model without a tokenizer, or a chat template that is neither text nor a file.
    """
    options = options or LoadOptions()
    if not isinstance(source, str | Path):
        if not hasattr(source, "get_input_embeddings") or not hasattr(source, "config"):
            raise ConfigError(NOT_A_MODEL.format(type(source).__name__))
        model, name = source, str(getattr(source, "name_or_path", "") or type(source).__name__)
        if tokenizer is None:
            raise ConfigError(f"a live model ({name}) does not know its tokenizer: pass tokenizer= as well")
        compatibility.require_causal_lm(source.config, name)
        if model.training:
            logger.debug("%s was in training mode and is now in eval mode", name)
            model.eval()
        where = config = None
    else:
        where = resolve_source(source)
        name, config = where.name, load_config(where, options)
    if tokenizer is None:
        tokenizer = _load_tokenizer(where, options)
    elif isinstance(tokenizer, str | Path):
        place = Path(tokenizer).expanduser()  # a folder with a tokenizer alone has no config.json
        other = Source(str(tokenizer), str(place), local=True) if place.is_dir() else resolve_source(tokenizer)
        tokenizer = _load_tokenizer(other, dataclasses.replace(options, revision=None))
    else:
        tokenizer = copy.deepcopy(tokenizer)  # its owner goes on using it, perhaps in another thread
    if chat_template is not None:
        tokenizer.chat_template = _template(chat_template)
    if where is not None:
        model = _load_weights(where, config, options)
    compatibility.log_ignored_settings(name, getattr(model, "generation_config", None))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_ids=compatibility.eos_ids(model.config, getattr(model, "generation_config", None), tokenizer),
        special_ids=compatibility.special_ids(tokenizer),
        context_window=compatibility.context_window(model.config, tokenizer),
        name=name,
        device=_input_device(model),
    )


def describe(source: Any, options: LoadOptions | None = None) -> dict[str, Any]:
    """What a checkpoint is, without loading its weights (the file of a GGUF is read for its header and tokenizer).

    Returns:
        JSON-able: name, architecture, parameters, dtype, memory_bytes (weights alone, unquantised, at that dtype),
        quantization (method), context_window, sliding_window, vocab_size, tokenizer_size, eos_ids, has_chat_template,
        ignored_generation_settings.

    Raises:
        ModelLoadError: as in `load_model`.
    """
    from transformers import GenerationConfig

    options = options or LoadOptions()
    where = resolve_source(source)
    config = load_config(where, options)
    tokenizer = _load_tokenizer(where, options)
    generation: Any = None
    if where.gguf_file is None:
        with contextlib.suppress(OSError):  # most base models have none
            generation = GenerationConfig.from_pretrained(where.place, **where.arguments(options))
    with explained(where):
        empty = _empty(config, options)
    parameters = _count_parameters(empty)
    dtype = options.dtype
    if dtype == "auto":
        stored = None if where.gguf_file else getattr(compatibility.text_config(config), "dtype", None)
        dtype = str(stored or fast_dtype(resolve_device(options))).removeprefix("torch.")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    text = compatibility.text_config(config)
    return {
        "name": where.name,
        "architecture": type(empty).__name__,
        "parameters": parameters,
        "dtype": dtype,
        "memory_bytes": parameters * getattr(torch, dtype).itemsize,
        "quantization": (quantization or {}).get("quant_method"),
        "context_window": compatibility.context_window(config, tokenizer),
        "sliding_window": compatibility.sliding_window(config),
        "vocab_size": text.vocab_size,
        "tokenizer_size": len(tokenizer),
        "eos_ids": sorted(compatibility.eos_ids(config, generation, tokenizer)),
        "has_chat_template": bool(tokenizer.chat_template),
        "ignored_generation_settings": ignored_generation_settings(generation),
    }


def _input_device(model: Any) -> torch.device:
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: the weights come to the device on which the layer runs
        first = next(iter(getattr(model, "hf_device_map", {"": model.device}).values()))
        return torch.device(f"cuda:{first}" if isinstance(first, int) else "cpu" if first == "disk" else first)
    return torch.device(device)


def load_tokenizer(source: str | Path, options: LoadOptions | None = None) -> Any:
    """Load the tokenizer of a model alone. Takes and raises what `load_model` does."""
    return _load_tokenizer(resolve_source(source), options or LoadOptions())


def load_config(where: Source, options: LoadOptions) -> Any:
    """The config of a causal language model. Raises `ModelLoadError`."""
    from transformers import AutoConfig

    with explained(where):
        config = AutoConfig.from_pretrained(where.place, **where.arguments(options))
    compatibility.require_causal_lm(config, where.name)
    return config


def _load_tokenizer(where: Any, options: LoadOptions) -> Any:
    from transformers import AutoTokenizer

    with explained(where, "tokenizer"):
        return AutoTokenizer.from_pretrained(where.place, **where.arguments(options))


def _load_weights(where: Source, config: Any, options: LoadOptions) -> Any:
    """`from_pretrained` straight onto the device, so that nothing is moved afterwards."""
    import transformers
    from transformers.utils.quantization_config import GgufConfig

    device = resolve_device(options)
    dtype: Any = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    arguments = where.arguments(options) | {"config": config, "device_map": options.device_map or device}
    if options.quantization_config is not None:
        arguments["quantization_config"] = options.quantization_config
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    with explained(where):
        if where.gguf_file is not None:
            dtype = fast_dtype(device) if dtype == "auto" else dtype
            arguments.setdefault("quantization_config", GgufConfig(dequantize=True))
            _log_unpacking(where, _count_parameters(_empty(config, options)) * dtype.itemsize, dtype)
        auto: Any = transformers.AutoModelForCausalLM
        model, info = auto.from_pretrained(where.place, dtype=dtype, output_loading_info=True, **arguments)
    wrong = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if wrong:
        raise ModelLoadError(
            f"{where.name!r} lacks {len(wrong)} of the weights that a {type(model).__name__} has (or has them in "
            f"another shape), {wrong[0]} for one: the checkpoint is incomplete, or config.json belongs to another one"
        )
    if unused := sorted(info["unexpected_keys"]):
        logger.warning(
            "%s has %d weights that a %s has no use for, %s for one: is its config.json its own?",
            where.name,
            len(unused),
            type(model).__name__,
            unused[0],
        )
    return model.eval().requires_grad_(False)


def _empty(config: Any, options: LoadOptions) -> Any:
    """The model without memory behind its weights: its class and its shapes."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(config), trust_remote_code=options.trust_remote_code)


def _count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _template(chat_template: str | Path) -> str:
    if isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template={str(chat_template)!r} is neither a Jinja template nor a file that opens"
        ) from error


def _log_unpacking(where: Source, needed: int, dtype: torch.dtype) -> None:
    size = Path(where.place, where.gguf_file or "").stat().st_size if where.local else 0
    packed = f" of {size / 1e9:.2f} GB" if size else ""
    logger.info("%s: the weights%s are unpacked to %s and will take %.2f GB", where.name, packed, dtype, needed / 1e9)
