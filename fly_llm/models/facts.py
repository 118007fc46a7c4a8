"""What a wrapper must know about a model before its weights are loaded: how much it holds, and whether it can chat.

Small files are read as they are: importing transformers would take longer than everything else. `glance` uses what
lies at hand and takes milliseconds; `look` reads whatever it must.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fly_llm.errors import FLyError
from fly_llm.models.bundled import CONTEXT_WINDOW, converted_folder
from fly_llm.models.compatibility import context_window
from fly_llm.models.sources import BUNDLED_NAME, Source, explained, resolve_source

if TYPE_CHECKING:
    from fly_llm.models.registry import ModelSpec

log = logging.getLogger("fly_llm")


@dataclass(frozen=True)
class Facts:
    """What is known about a model.

    Attributes:
        context_window: the most tokens it can hold; None if nothing says so.
        chat_template: its chat template, None if it has none; of the bundled model, before its first use, a stand-in.
    """

    context_window: int | None
    chat_template: str | None


def glance(spec: ModelSpec) -> Facts | None:
    """The facts as far as files on this machine give them; None if they do not. Never loads, downloads or raises."""
    try:
        return _of_live(spec) if spec.is_live else _of_files(spec, ask_hub=False)
    except (FLyError, OSError, ValueError, TypeError, AttributeError) as error:
        log.debug("nothing to be seen of %r: %s", spec.source, error)
        return None


def look(spec: ModelSpec) -> Facts:
    """The facts, from files alone, downloading small ones and reading a GGUF file's header if it must.

    Raises:
        ModelLoadError: the model is not there.
    """
    found = glance(spec)
    if found is not None and found.context_window is not None:
        return found
    return _of_files(spec, ask_hub=True) or Facts(None, None)


def of_pair(target: Any) -> Facts:
    """The facts about a loaded model (`LoadedModel`)."""
    return Facts(target.context_window, _default_template(target.tokenizer.chat_template))


def _of_live(spec: ModelSpec) -> Facts | None:
    if not hasattr(spec.source, "config"):
        return None
    template = spec.chat_template or getattr(spec.tokenizer, "chat_template", None)
    tokenizer = None if isinstance(spec.tokenizer, (str, Path)) else spec.tokenizer
    return Facts(context_window(spec.source.config, tokenizer), _default_template(template))


def _of_files(spec: ModelSpec, *, ask_hub: bool) -> Facts | None:
    where = resolve_source(BUNDLED_NAME if spec.source is None else spec.source)
    if spec.source is None and (folder := converted_folder()) is not None:
        where = Source(where.name, str(folder), local=True)
    elif spec.source is None:  # not converted yet, which its first request does; it is known all the same
        return Facts(CONTEXT_WINDOW, _default_template(spec.chat_template) or "the bundled model's own")
    if where.gguf_file is not None:
        return _of_gguf(where, spec) if ask_hub else None
    config: Any = None
    if ask_hub:
        from fly_llm.models.loading import load_config

        config = load_config(where, spec.options)  # raises if the model is not there; a class may have defaults
    elif (text := _read(where, spec, "config.json", ask_hub)) is not None:
        values = json.loads(text)
        config = SimpleNamespace(**values.get("text_config", values))
    if config is None:
        return None
    tokenizer = json.loads(_read(where, spec, "tokenizer_config.json", ask_hub) or "{}")
    template = (
        spec.chat_template or _read(where, spec, "chat_template.jinja", ask_hub) or tokenizer.get("chat_template")
    )
    return Facts(context_window(config, SimpleNamespace(**tokenizer)), _default_template(template))


def _of_gguf(where: Source, spec: ModelSpec) -> Facts:
    from gguf import GGUFReader

    name = where.gguf_file or ""
    with explained(where):
        path: Any = Path(where.place, name)
        if not where.local:
            from transformers.utils.hub import cached_file

            path = cached_file(where.place, name, revision=spec.options.revision, token=spec.options.token)
        fields = GGUFReader(path).fields
        values = {
            name.split(".", 1)[1]: field.contents()
            for name, field in fields.items()
            if name.endswith((".context_length", ".chat_template"))
        }
    length = values.get("context_length")
    template = spec.chat_template or values.get("chat_template")
    return Facts(int(length) if length else None, _default_template(template))


def _read(where: Source, spec: ModelSpec, name: str, ask_hub: bool) -> str | None:
    """The text of a small file of a model; None if it is not there."""
    path: Any = Path(where.place, name)
    if not where.local:
        if ask_hub:
            from transformers.utils.hub import cached_file

            with explained(where):
                path = cached_file(
                    where.place,
                    name,
                    revision=spec.options.revision,
                    token=spec.options.token,
                    local_files_only=spec.options.local_files_only,
                    _raise_exceptions_for_missing_entries=False,
                )
        else:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(where.place, name, revision=spec.options.revision)
        if not isinstance(path, str):
            return None
    return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None


def _default_template(template: Any) -> str | None:
    """One template of several: the one called "default"."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else str(template)
