"""LangChain models over fly-llm: local models, sped up by loose speculative decoding."""

from __future__ import annotations

try:
    import langchain_core as _langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError("langchain_fly needs langchain-core: pip install 'fly-llm[langchain]'") from error

from langchain_fly.callbacks import AsyncFLyCallbackHandler, FLyCallbackHandler
from langchain_fly.chat_models import ChatFLy
from langchain_fly.common import ChatFLyContextOverflowError
from langchain_fly.llms import FLyLLM

__all__ = ["AsyncFLyCallbackHandler", "ChatFLy", "ChatFLyContextOverflowError", "FLyCallbackHandler", "FLyLLM"]
