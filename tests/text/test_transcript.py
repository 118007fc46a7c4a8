"""The text side of the loop's callbacks, token by token."""

from __future__ import annotations

import pytest
from tiny_models import tiny_tokenizer

from fly_llm.text.transcript import Transcript

TOKENIZER = tiny_tokenizer()


def ids(text):
    return TOKENIZER(text)["input_ids"]


def test_exact_asks_about_the_drafts_token_and_the_targets_own():
    """Position i is strict if either of the two, after the draft before it, would complete a stop string."""
    transcript = Transcript(TOKENIZER, ["zq"])
    assert transcript.cut(ids("z")) is None  # held: it may be the beginning of the stop string
    a, q, z = (ids(letter)[0] for letter in "aqz")
    assert transcript.exact([a, a], [a, a]) == [False, False]
    assert transcript.exact([q, a], [a, a])[0] is True  # the draft's token completes it
    assert transcript.exact([a, a], [q, a]) == [True, False]  # the target's own does
    assert transcript.exact([z, q], [a, a]) == [False, True]  # with the draft token before it
    assert transcript.exact([z, a], [a, q]) == [False, True]
    assert transcript.exact([a, a], [a, q]) == [False, False]


@pytest.mark.parametrize("prefix", [0, 1, 4, 9])
def test_the_strict_prefix_counts_from_the_start_of_the_answer(prefix):
    transcript = Transcript(TOKENIZER, [], prefix)
    done = 0
    for size in (1, 3, 2, 6):
        assert transcript.exact([70] * 4, [71] * 4) == [done + i < prefix for i in range(4)]
        transcript.cut([70] * size)
        done += size


def test_cut_keeps_the_token_that_completes_a_stop_string_and_not_its_text():
    transcript = Transcript(TOKENIZER, ["b c"])
    tokens = ids("a b cd")
    assert transcript.cut(tokens[:2]) is None
    keep = transcript.cut(tokens[2:])
    assert keep is not None
    assert TOKENIZER.decode(tokens[: 2 + keep]).endswith("b c")
    transcript.finish()
    assert transcript.take()[0] == "a "


def test_a_relaxed_token_whose_text_is_held_is_marked_when_it_comes_out():
    transcript = Transcript(TOKENIZER, [])
    bytes_ = ids("é")
    assert len(bytes_) == 2
    transcript.cut(bytes_[:1])
    transcript.mark([0])
    assert transcript.take() == ("", ())
    transcript.cut([*bytes_[1:], *ids("x")])
    assert transcript.take() == ("éx", ((0, 1),))
    assert transcript.span(0) == (0, 1)
    assert transcript.take() == ("", ())


def test_text_taken_away_by_a_stop_string_has_no_marks():
    transcript = Transcript(TOKENIZER, ["zq"])
    tokens = [ids(letter)[0] for letter in "azq"]
    assert transcript.cut(tokens) == 3
    transcript.mark(range(3))
    transcript.finish()
    assert transcript.take() == ("a", ((0, 1),))
    assert [transcript.span(i) for i in range(3)] == [(0, 1), (1, 1), (1, 1)]
