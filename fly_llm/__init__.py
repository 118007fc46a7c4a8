"""fly-llm: local language models, sped up by loose speculative decoding (FLy, arXiv 2511.22972).

Importing this package is fast and does not import torch; that happens with the first engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fly_llm.config import FLyConfig, SamplingConfig, overrides
from fly_llm.errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    FLyError,
    ModelLoadError,
    PromptError,
    TokenizerMismatchError,
    UnsupportedCacheError,
)
from fly_llm.types import Event, Result, Round, Stats, Usage

if TYPE_CHECKING:
    from fly_llm.engine import FLyEngine

__all__ = [
    "ConfigError",
    "ContextOverflowError",
    "EngineClosedError",
    "Event",
    "FLyConfig",
    "FLyEngine",
    "FLyError",
    "ModelLoadError",
    "PromptError",
    "Result",
    "Round",
    "SamplingConfig",
    "Stats",
    "TokenizerMismatchError",
    "UnsupportedCacheError",
    "Usage",
    "overrides",
]


def __getattr__(name: str) -> Any:
    if name == "FLyEngine":
        from fly_llm.engine import FLyEngine

        return FLyEngine
    raise AttributeError(f"module 'fly_llm' has no attribute {name!r}")
