"""LangChain's own test suites: the unit suite, and the integration suite over the real local path (SmolLM2).

Tests that need tool calling or structured output are switched off until those exist; the rest run.
"""

from __future__ import annotations

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from fly_llm import FLyEngine
from langchain_fly import ChatFLy


@pytest.fixture(scope="module", autouse=True)
def weights():
    """Held by one engine, so that every test's own model finds them loaded."""
    with FLyEngine.from_pretrained() as engine:
        yield engine.load()


class TestUnit(ChatModelUnitTests):
    """The model does not exist, so nothing can be loaded."""

    @property
    def chat_model_class(self):
        return ChatFLy

    @property
    def chat_model_params(self):
        return {"model": "no/such-model"}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False


class TestIntegration(ChatModelIntegrationTests):
    """The bundled model answers."""

    @property
    def chat_model_class(self):
        return ChatFLy

    @property
    def chat_model_params(self):
        return {"max_tokens": 48}

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_tool_choice(self):
        return False

    @property
    def has_structured_output(self):
        return False

    @property
    def supports_model_override(self):
        return False
