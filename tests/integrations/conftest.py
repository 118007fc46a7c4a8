"""Tiny models on disk, so that wrappers can be made, copied and pickled by name."""

from __future__ import annotations

import pytest
from tiny_models import noisy_copy, tiny_llama, tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """The folders of a target and of a draft model that often agrees with it."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_llama(seed=2)
    for name, model in (("target", target), ("draft", noisy_copy(target))):
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return str(root / "target"), str(root / "draft")
