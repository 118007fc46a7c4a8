"""What a model is and whether two of them fit together, without loading weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_llm.errors import TokenizerMismatchError

if TYPE_CHECKING:
    from fly_llm.models.options import LoadOptions


def examine(target: str | None, draft: str | None, options: LoadOptions) -> dict[str, Any]:
    """Describe a model, or a pair.

    Args:
        target: what to describe; None is the bundled default.
        draft: its draft model, if there is one.
        options: how the models would be loaded.

    Returns:
        JSON-able: "target" and "draft" (see `fly_llm.models.loading.describe`; None without a draft model),
        "compatible" (None without a draft model) and "problem" (what keeps the two apart, or None).

    Raises:
        ModelLoadError: one of them cannot be read.
    """
    from fly_llm.models.bundled import default_target
    from fly_llm.models.loading import describe
    from fly_llm.models.sources import BUNDLED_NAME

    source = default_target() if target is None else target
    described = describe(source, options)
    if target is None:
        described["name"] = BUNDLED_NAME  # not the folder in which this machine keeps it
    if draft is None:
        return {"target": described, "draft": None, "compatible": None, "problem": None}
    pair = {"target": described, "draft": describe(draft, options)}
    problem = _problem(source, draft, options)
    return {**pair, "compatible": problem is None, "problem": problem}


def _problem(target: str | Path, draft: str, options: LoadOptions) -> str | None:
    """Why the draft model cannot draft for the target, or None."""
    from fly_llm.models.compatibility import check_tokenizers
    from fly_llm.models.loading import load_tokenizer

    tokenizers = [load_tokenizer(source, options) for source in (target, draft)]
    try:
        check_tokenizers(*tokenizers, target_name=str(target), draft_name=draft)
    except TokenizerMismatchError as error:
        return str(error)
    return None


def facts(description: dict[str, Any]) -> str:
    """A description for people, one fact a line."""
    quantization = description["quantization"]
    window = description["sliding_window"]
    ignored = description["ignored_generation_settings"]
    context = description["context_window"]
    lines = {
        "name": description["name"],
        "architecture": description["architecture"],
        "parameters": f"{description['parameters']:,}",
        "weights": f"{description['memory_bytes'] / 1e9:.2f} GB in {description['dtype']}"
        + (f" before quantisation ({quantization})" if quantization else ""),
        "context window": "not stated" if context is None else f"{context:,} tokens",
        "sliding window": "none" if window is None else f"{window:,} tokens",
        "vocabulary": f"{description['vocab_size']:,} ids, {description['tokenizer_size']:,} in the tokenizer",
        "end of sequence": ", ".join(map(str, description["eos_ids"])) or "no id",
        "chat template": "yes" if description["has_chat_template"] else "no: use --raw",
        "not inherited": ", ".join(f"{name}={value}" for name, value in ignored.items()) or "nothing",
    }
    return "\n".join(f"{name:<17}{value}" for name, value in lines.items())
