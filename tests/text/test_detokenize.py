"""Streamed text is the decoded text: for any ids, joined pieces equal one decode of them all."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_level, metaspace, sentencepiece

from fly_llm.text.detokenize import Detokenizer

MAKERS = {
    "byte-level": byte_level,
    "byte-level, visible control tokens": lambda: byte_level(control_is_special=False),
    "sentencepiece": sentencepiece,
    "sentencepiece, no strip": lambda: sentencepiece(strip=0),
    "sentencepiece, strip two": lambda: sentencepiece(strip=2),
    "metaspace": metaspace,
}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}
TEXT = "naïve 😀 family 👨‍👩‍👧 привет 中文, 한국어!\n\n  indented  twice 🇫🇷"


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def awkward(tokenizer):
    """Ids that random choice would seldom put next to each other: bytes, spaces, U+FFFD, special and unknown ids."""
    texts = (
        "Ã",
        "©",
        "ð",
        "Ł",
        "ĺ",
        "ÿ",
        "ä",
        "¸",
        "Ń",
        "Ġ",
        "ĠĠ",
        "▁",
        "▁▁",
        "�",
        "▁�",
        "<s>",
        "</s>",
        "<|im_end|>",
        "<unk>",
        "a",
    )
    texts += tuple(f"<0x{byte:02X}>" for byte in (0x41, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x0A))
    vocab = tokenizer.get_vocab()
    return [vocab[text] for text in texts if text in vocab] + [len(tokenizer) + 7]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_pieces_equal_one_decode_for_any_ids(name):
    tokenizer = TOKENIZERS[name]
    one = st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(awkward(tokenizer)))

    @settings(max_examples=400, deadline=None)
    @given(st.lists(one, max_size=60))
    def check(ids):
        detokenizer = Detokenizer(tokenizer)
        joined = ""
        for end, token_id in enumerate(ids, start=1):
            held_and_new = detokenizer.peek([token_id])
            piece = detokenizer.push(token_id)
            assert held_and_new.startswith(piece)
            joined += piece
            assert detokenizer.text == joined
            assert joined + detokenizer.peek([]) == whole(tokenizer, ids[:end])
        joined += detokenizer.flush()
        assert joined == detokenizer.text == whole(tokenizer, ids)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_peek_tells_the_text_of_a_round_and_changes_nothing(name):
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.sampled_from(awkward(tokenizer)), max_size=40),
        st.lists(st.sampled_from(awkward(tokenizer)), max_size=9),
    )
    def check(before, after):
        detokenizer = Detokenizer(tokenizer)
        for token_id in before:
            detokenizer.push(token_id)
        peeked = detokenizer.peek(after)
        assert peeked == detokenizer.peek(after)
        assert detokenizer.text + peeked == whole(tokenizer, before + after)

    check()


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "sentencepiece, no strip"])
def test_real_text_never_shows_a_broken_character(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert "".join(pieces) == TEXT
    assert "" in pieces, "the text must have characters of several tokens for this test to mean anything"
    assert not any("�" in piece for piece in pieces)
    assert max(len(piece) for piece in pieces) < 30, "pieces come as they are finished, not all at the end"


def test_decoding_tokens_one_by_one_fails_what_the_detokenizer_passes():
    """The naive way, to see that these inputs tell the two apart."""
    for name in ("byte-level", "sentencepiece"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        assert "".join(whole(tokenizer, [token_id]) for token_id in ids) != whole(tokenizer, ids)


def test_the_space_behind_a_special_token_is_kept():
    tokenizer = TOKENIZERS["sentencepiece"]
    vocab = tokenizer.get_vocab()
    the = next(vocab[token] for token in ("▁the", "▁t", "▁s") if token in vocab)
    ids = [the, *[vocab["</s>"]] * 50, the]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text.count(" ") == 1
    assert text == whole(tokenizer, ids)


def test_a_byte_run_waits_for_its_end_because_one_stray_byte_undoes_it():
    tokenizer = TOKENIZERS["sentencepiece"]
    vocab = tokenizer.get_vocab()
    good = [vocab[f"<0x{byte:02X}>"] for byte in "中".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in good] == ["", "", ""]
    assert detokenizer.peek([]) == "中"
    assert detokenizer.push(vocab["a"]) == "中a"
    detokenizer = Detokenizer(tokenizer)
    for token_id in good:
        detokenizer.push(token_id)
    detokenizer.push(vocab["<0xFF>"])
    assert detokenizer.push(vocab["a"]) == "����a"


def test_a_genuine_replacement_character_comes_out_with_the_next_token():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ok � then", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(shown) == "ok � then"
    assert detokenizer.flush() == ""


def test_flush_ends_the_answer():
    detokenizer = Detokenizer(TOKENIZERS["byte-level"])
    first = TOKENIZERS["byte-level"].encode("𝄞", add_special_tokens=False)[:1]
    assert detokenizer.push(first[0]) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""
    with pytest.raises(RuntimeError, match="after flush"):
        detokenizer.push(first[0])


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_the_window_stays_short_however_long_the_answer(name):
    """Counted in decoded tokens, not in seconds: text, and bytes that are no text at all."""
    tokenizer = TOKENIZERS[name]
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    junk = (
        ["ÿ", "ä¸", "ðŁĺ", "ÿðŁ"] if name == "byte-level" else ["�"]
    )  # bytes that are no character, and parts of some
    runs = [[tokenizer.get_vocab()[token] for token in tokens] * 300 for tokens in junk]
    for ids in (text * 20, [tokenizer.eos_token_id] * 500, *runs):
        detokenizer = Detokenizer(tokenizer)
        longest = 0
        decode = detokenizer._decode

        def counted(window, decode=decode):
            nonlocal longest
            longest = max(longest, len(window))
            return decode(window)

        detokenizer._decode = counted
        pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
        assert "".join(pieces) == whole(tokenizer, ids)
        assert longest <= 64


def test_a_long_byte_run_takes_linear_time():
    tokenizer = TOKENIZERS["sentencepiece"]
    run = [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in "中".encode()] * 3000
    detokenizer = Detokenizer(tokenizer)
    started = time.perf_counter()
    assert all(detokenizer.push(token_id) == "" for token_id in run)
    assert detokenizer.flush() == "中" * 3000
    assert time.perf_counter() - started < 2
