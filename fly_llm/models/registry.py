"""One set of weights per pair of models in a process, loaded on first use, and the one thread that runs them.

Engines are cheap handles: making one loads nothing. Two handles on the same models and options share weights and
thread, so requests run to completion in the order they arrive, whoever sent them. The weights go with the last handle.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_llm.errors import EngineClosedError, FLyError
from fly_llm.models.prefixes import PrefixStore

if TYPE_CHECKING:
    from fly_llm.models.loading import LoadedModel
    from fly_llm.models.options import LoadOptions

log = logging.getLogger("fly_llm")


@dataclass(frozen=True)
class ModelSpec:
    """What to load, and how: a name, or a live object that is already loaded.

    Attributes:
        source: hub name, folder, GGUF file, live model, or None for the bundled default.
        options: see `LoadOptions`.
        tokenizer: a tokenizer, or its name, instead of the checkpoint's.
        chat_template: a Jinja template, or the path of one, instead of the tokenizer's.
    """

    source: Any
    options: LoadOptions
    tokenizer: Any = None
    chat_template: str | Path | None = None

    @property
    def is_live(self) -> bool:
        """Whether it holds loaded objects, which can be neither pickled nor loaded again."""
        return any(thing is not None and not isinstance(thing, (str, Path)) for thing in (self.source, self.tokenizer))

    def __post_init__(self) -> None:
        for name in ("source", "tokenizer"):  # a path means what it means now, wherever the process goes later
            thing = getattr(self, name)
            if isinstance(thing, (str, Path)) and str(thing) and Path(thing).expanduser().exists():
                object.__setattr__(self, name, str(Path(thing).expanduser().absolute()))

    def key(self) -> tuple[Any, ...]:
        """Equal for specs that can share weights; a live object is equal to itself only."""
        names = [
            str(thing) if thing is None or isinstance(thing, (str, Path)) else (type(thing).__name__, id(thing))
            for thing in (self.source, self.tokenizer)
        ]
        return (*names, str(self.chat_template), self.options.key())

    def load(self) -> LoadedModel:
        """Load it. Raises `ModelLoadError`."""
        from fly_llm.models.bundled import default_target
        from fly_llm.models.loading import load_model
        from fly_llm.models.sources import BUNDLED_NAME

        source = default_target() if self.source is None else self.source
        loaded = load_model(source, self.options, tokenizer=self.tokenizer, chat_template=self.chat_template)
        if self.source is None:
            loaded.name = BUNDLED_NAME  # not the folder in which this machine keeps it
        return loaded


@dataclass
class Pair:
    """A loaded target, and the draft model if there is one; their tokenizers agree.

    A tokenizer is not safe to share between threads: encoding sets switches on it. `target.tokenizer` belongs to the
    worker thread; everybody else gets a copy.
    """

    target: LoadedModel
    draft: LoadedModel | None
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by callers while they use `tokenizer`."""
    prefixes: PrefixStore = field(default_factory=PrefixStore)
    """Caches of finished requests; belongs to the worker thread."""
    grammar_tokenizer: Any = None
    """What decoding under a grammar needs of the tokenizer; made by the first request that does."""
    _copy: Any = None

    @property
    def tokenizer(self) -> Any:
        """A copy of the target's tokenizer for threads other than the worker; made when it is first asked for."""
        with self.lock:
            if self._copy is None:
                self._copy = copy.deepcopy(self.target.tokenizer)
            return self._copy


class SharedModels:
    """The models of one pair, and their worker thread. Use `acquire` and `release`."""

    def __init__(self, target: ModelSpec, draft: ModelSpec | None) -> None:
        self.target_spec = target
        self.draft_spec = draft
        self._pair: Pair | None = None
        self._load_lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._pid = 0
        self._stopped = False
        self.handles = 0
        self.exiting = False
        _alive.add(self)
        """The interpreter is shutting down; requests end before their next forward."""

    def pair(self) -> Pair:
        """The loaded models; the first call loads them. Raises `ModelLoadError`, and tries again next time."""
        with self._load_lock:
            if self._pair is None:
                from fly_llm.models.compatibility import check_tokenizers

                target = self.target_spec.load()
                draft = self.draft_spec.load() if self.draft_spec else None
                if draft is not None:
                    check_tokenizers(
                        target.tokenizer,
                        draft.tokenizer,
                        target_name=target.name,
                        draft_name=draft.name,
                        sizes=(target.vocab_size, draft.vocab_size),
                    )
                self._pair = Pair(target, draft)
            return self._pair

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._pair is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job for the worker thread. The job handles its own errors.

        Raises:
            FLyError: this process was forked from one in which the thread ran; it did not come along.
            EngineClosedError: the last handle was closed, or the interpreter is shutting down.
        """
        with self._thread_lock:
            if self._thread is not None and self._pid != os.getpid():
                raise FLyError(
                    "this process was forked from one that had used the engine, whose thread did not come along: use "
                    "the 'spawn' start method, or fork before the first request"
                )
            if self._stopped or self.exiting:
                raise EngineClosedError("this engine has been closed: make a new one")
            self._pid = os.getpid()
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name="fly-llm", daemon=True)
                self._thread.start()
                _threads.add(self._thread)
            self._jobs.put(job)

    def stop(self) -> None:
        """Let the weights go and end the worker thread, once the requests in its queue are done."""
        with self._thread_lock:
            self._stopped = True
            if self._thread is None:
                self._unload()
            else:
                self._jobs.put(self._unload)
                self._jobs.put(None)
                self._thread = None

    def _unload(self) -> None:
        with self._load_lock:
            self._pair = None

    def exit(self) -> None:
        """The interpreter is going: end requests before their next forward, and the thread after them."""
        self.exiting = True
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:  # a job reports its errors to its request, so this one is a bug
            log.exception("a request ended in an unexpected error")
        del job


_shared: dict[tuple[Any, ...], SharedModels] = {}
_lock = threading.RLock()
_alive: weakref.WeakSet[SharedModels] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def acquire(target: ModelSpec, draft: ModelSpec | None) -> SharedModels:
    """The shared models for these specs; loads nothing. Pair every call with `release`."""
    key = (target.key(), draft.key() if draft else None)
    with _lock:
        models = _shared.get(key)
        if models is None:
            models = _shared[key] = SharedModels(target, draft)
        models.handles += 1
        return models


def release(models: SharedModels) -> None:
    """Give up one handle; the last one stops the thread and frees the weights."""
    with _lock:
        models.handles -= 1
        if models.handles > 0:
            return
        for key, value in list(_shared.items()):
            if value is models:
                del _shared[key]
    models.stop()


@atexit.register
def _exit() -> None:
    """Wait for the worker threads, of closed engines too: one that is killed inside torch aborts the process."""
    for models in list(_alive):
        models.exit()
    for thread in list(_threads):
        thread.join(timeout=30)  # in a forked process the threads are not there, and known to have ended


class Handle:
    """One user's hold on shared models; given up on `close`, or when it is garbage."""

    def __init__(self, target: ModelSpec, draft: ModelSpec | None) -> None:
        self._models: SharedModels | None = acquire(target, draft)
        self._finalizer = weakref.finalize(self, release, self._models)
        self._finalizer.atexit = False

    @property
    def models(self) -> SharedModels:
        """The shared models. Raises `EngineClosedError` after `close`."""
        if self._models is None:
            raise EngineClosedError("this engine has been closed: make a new one (weights that are in use stay shared)")
        return self._models

    @property
    def closed(self) -> bool:
        """Whether the hold has been given up."""
        return self._models is None

    def close(self) -> None:
        """Give up the hold. Closing twice does no harm."""
        self._models = None
        self._finalizer()
