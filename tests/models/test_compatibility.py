"""Two tokenizers: the same, nearly the same, and only seemingly the same."""

import copy
import json
import time

import pytest
from tiny_models import tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen2, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3Config, GPT2Config, PreTrainedTokenizerFast

from fly_llm.errors import TokenizerMismatchError
from fly_llm.models.compatibility import check_tokenizers, context_window, eos_ids, sliding_window, special_ids


def check(target, draft):
    check_tokenizers(target, draft, target_name="big", draft_name="small")


def refused(target, draft):
    with pytest.raises(TokenizerMismatchError) as caught:
        check(target, draft)
    message = str(caught.value)
    for word in ("'big'", "'small'", "Qwen2.5-0.5B", "draft=None"):
        assert word in message
    return message


def edited(change):
    """A tiny tokenizer whose `tokenizer.json` went through `change`."""
    raw = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    change(raw)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(raw)), bos_token="<s>", eos_token="</s>"
    )


def test_the_same():
    check(tiny_tokenizer(), tiny_tokenizer())
    bare = edited(lambda raw: None)
    bare.chat_template = None
    check(tiny_tokenizer(), bare)


def test_swapped_tokens_name_the_first():
    def swap(raw):
        vocab = raw["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    first = min(tiny_tokenizer().convert_tokens_to_ids(["a", "b"]))
    message = refused(tiny_tokenizer(), edited(swap))
    assert f"id {first} " in message
    assert "'a'" in message
    assert "'b'" in message


@pytest.mark.parametrize("more_in_draft", [True, False])
def test_a_token_that_only_one_has(more_in_draft):
    longer = copy.deepcopy(tiny_tokenizer())
    longer.add_tokens(["<tool>"])
    pair = (tiny_tokenizer(), longer) if more_in_draft else (longer, tiny_tokenizer())
    message = refused(*pair)
    assert "id 320 " in message
    assert "'<tool>'" in message
    assert "absent" in message


def test_padding_placeholders_are_not_tokens():
    padded = copy.deepcopy(tiny_tokenizer())
    padded.add_tokens([f"[PAD{i}]" for i in range(320, 384)])
    assert len(padded) == 384
    check(tiny_tokenizer(), padded)
    check(padded, tiny_tokenizer())
    wrong = copy.deepcopy(tiny_tokenizer())
    wrong.add_tokens(["[PAD7]"])
    refused(tiny_tokenizer(), wrong)


def test_equal_vocabularies_used_differently():
    def drop_merges(raw):
        raw["model"]["merges"] = raw["model"]["merges"][1:]  # "th" is no longer one token

    def normalise(raw):
        raw["normalizer"] = {"type": "NFC"}

    for change in (drop_merges, normalise):
        message = refused(tiny_tokenizer(), edited(change))
        assert "probe" in message


def big_tokenizer(count):
    vocab = {f"w{i}": i for i in range(count)} | {"[UNK]": count}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_large_vocabularies_are_compared_fast():
    target, draft = big_tokenizer(150_000), big_tokenizer(150_000)
    start = time.perf_counter()
    check(target, draft)
    assert time.perf_counter() - start < 2  # 0.3 s on an idle core


# -- what a checkpoint says -------------------------------------------------------------------------------------------


def test_eos_ids_are_a_union():
    model, tokenizer = tiny_llama(eos_token_id=[5, 6]), tiny_tokenizer()
    model.generation_config.eos_token_id = 7
    assert eos_ids(model.config, model.generation_config, tokenizer) == {1, 5, 6, 7}
    assert eos_ids(tiny_llama().config, None, None) == frozenset()


def test_special_ids_hold_added_tokens():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    assert special_ids(tokenizer) == {0, 1, 2, 3, 320}


def test_context_window_and_sliding_window():
    assert context_window(GPT2Config(n_positions=77)) == 77
    assert context_window(object()) is None
    nested = Gemma3Config(text_config={"max_position_embeddings": 99, "sliding_window": 5, "num_hidden_layers": 2})
    assert context_window(nested) == 99
    assert sliding_window(nested) == 5
    assert sliding_window(tiny_mistral().config) == 8
    assert sliding_window(tiny_gemma3().config) == 8
    assert sliding_window(tiny_qwen2().config) is None
