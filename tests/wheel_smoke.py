"""What an installed wheel must do, run by `make test-wheel` in an environment that holds the wheel and nothing of this
checkout: both integrations import beside their frameworks and answer with a tiny model.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the tiny models alone


def main() -> None:
    import llama_index.core
    import llama_index.llms.fly
    from tiny_models import noisy_copy, tiny_llama, tiny_tokenizer

    import fly_llm
    import langchain_fly

    for module in (fly_llm, langchain_fly, llama_index.llms.fly):
        assert "site-packages" in str(module.__file__), f"{module} is not the wheel's"
    assert not hasattr(llama_index, "__file__") or llama_index.__file__ is None
    target = tiny_llama()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("target", target), ("draft", noisy_copy(target))):
            model.save_pretrained(Path(folder, name))
            tiny_tokenizer().save_pretrained(Path(folder, name))
        names = {"model": f"{folder}/target", "draft_model": f"{folder}/draft", "max_tokens": 20}
        chat = langchain_fly.ChatFLy(**names).invoke("the quick brown fox")
        text = langchain_fly.FLyLLM(**names).invoke("the quick brown fox")
        llm = llama_index.llms.fly.FLyLLM(**names)
        answer = llm.complete("the quick brown fox")
        pieces = [piece.delta for piece in llm.stream_complete("the quick brown fox")]
    assert answer.text == chat.content == "".join(pieces) != text
    assert answer.raw["fly"]["num_draft_tokens"] > 0
    versions = {
        name: importlib.metadata.version(name)
        for name in ("fly-llm", "langchain-core", "llama-index-core", "transformers", "torch")
    }
    sys.stdout.write(f"{versions}\n")


if __name__ == "__main__":
    main()
