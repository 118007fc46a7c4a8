"""LlamaIndex LLM over fly-llm: local models, sped up by loose speculative decoding."""

from __future__ import annotations

try:
    import llama_index.core as _llama_index_core  # noqa: F401
except ImportError as error:
    raise ImportError("llama_index.llms.fly needs llama-index-core: pip install 'fly-llm[llama-index]'") from error

from llama_index.llms.fly.base import FLyLLM
from llama_index.llms.fly.events import FLyRoundEvent

__all__ = ["FLyLLM", "FLyRoundEvent"]
