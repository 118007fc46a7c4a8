"""Grammars under speculation: masks along a draft are those of the tokens one by one, and looking changes nothing."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from llguidance import LLMatcher
from tiny_models import VOCAB_SIZE, tiny_tokenizer
from tokenizers_for_tests import byte_level, metaspace, sentencepiece

from fly_llm.errors import ConfigError
from fly_llm.text.constrain import (
    Constraint,
    choice_grammar,
    grammar_tokenizer,
    json_grammar,
    json_rule,
    regex_grammar,
)

EOS = 1
TOKENIZER = tiny_tokenizer()
GUIDED = grammar_tokenizer(TOKENIZER, VOCAB_SIZE, {EOS})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["the fox", "the dog", 'a "b"']},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
}
GRAMMARS = {
    "object": json_grammar(PERSON),
    "any": json_grammar({"type": "object"}),
    "regex": regex_grammar(r"[0-9]{2,4}/(the|then) ?x*"),
    "choice": choice_grammar(["yes", "no", 'the "fox"\nand the dog', "the \\ dog"]),
    "lark": 'start: WORD (" " WORD){1,3} "."\nWORD: /[a-z]{1,4}/\n',
}


def constraint(grammar, eos_ids=(EOS,), tokenizer=GUIDED):
    return Constraint(tokenizer, grammar, eos_ids)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def reference(grammar, tokens, eos_ids=(EOS,), tokenizer=GUIDED):
    """What may follow these tokens, by a matcher that has seen nothing else; None if they are not in the grammar."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    for token in tokens:
        if token in eos_ids or matcher.is_stopped() or not matcher.consume_token(token):
            return None
    if matcher.is_stopped():
        return set(eos_ids)
    bits = matcher.compute_bitmask()
    return {i for i in range(tokenizer.vocab_size) if bits[i // 8] >> (i % 8) & 1}


def allowed_in(row):
    return set(torch.nonzero(row > -torch.inf)[:, 0].tolist())


def walk(grammar, rng, length, stray=0.1):
    """Tokens as a model would draft them: mostly allowed ones, shut brackets and ends among them."""
    tokens = []
    for _ in range(length):
        may = reference(grammar, tokens)
        if not may or rng.random() < stray:
            tokens.append(rng.randrange(4, VOCAB_SIZE))
        else:
            tokens.append(rng.choice(sorted(may)))
    return tokens


@pytest.mark.parametrize("name", GRAMMARS)
def test_a9_masks_along_a_draft_equal_masks_of_tokens_committed_one_by_one(name):
    grammar, rng = GRAMMARS[name], random.Random(name)
    left, ended = 0, 0
    for _ in range(10):
        answer = walk(grammar, rng, rng.randrange(0, 6), stray=0)
        if EOS in answer:
            continue
        guide = constraint(grammar)
        guide.commit(answer)
        tentative = [] if rng.random() < 0.5 else walk(grammar, rng, 2, stray=0.2)
        draft = walk(grammar, rng, 6, stray=0.15)
        if rng.random() < 0.7:  # a draft that goes on from here, rather than from anywhere
            may = []
            for _ in range(6):
                found = reference(grammar, [*answer, *tentative, *may])
                may.append(rng.choice(sorted(found)) if found else rng.randrange(VOCAB_SIZE))
            draft = may
        logits = torch.randn(len(draft) + 1, VOCAB_SIZE)
        masked = guide.mask(tentative, draft, logits.clone())
        for i in range(len(draft) + 1):
            expected = reference(grammar, [*answer, *tentative, *draft[:i]])
            if expected is None:  # behind a token that is rejected
                left += 1
                assert torch.equal(masked[i], logits[i])
                continue
            ended += EOS in expected
            assert allowed_in(masked[i]) == expected, (answer, tentative, draft[:i])
            assert torch.equal(masked[i][sorted(expected)], logits[i][sorted(expected)]), "the others are untouched"
    assert left > 3
    assert ended > 0 or name in ("any", "object"), "some drafts go to the end of the grammar, and beyond"


@pytest.mark.parametrize("name", GRAMMARS)
def test_a9_looking_ahead_in_any_order_changes_nothing(name):
    grammar, rng = GRAMMARS[name], random.Random(f"order {name}")
    for _ in range(6):
        busy, quiet = constraint(grammar), constraint(grammar)
        committed = []
        for _ in range(8):
            for _ in range(rng.randrange(1, 5)):
                tentative, draft = walk(grammar, rng, rng.randrange(3)), walk(grammar, rng, rng.randrange(5))
                look = rng.randrange(3)
                if look == 0:
                    busy.mask(tentative, draft, torch.zeros(len(draft) + 1, VOCAB_SIZE))
                elif look == 1:
                    busy.forced(tentative, rng.randrange(6))
                else:
                    busy.allowed(tentative, draft)
            row = torch.zeros(1, VOCAB_SIZE)
            assert torch.equal(busy.mask((), [], row), quiet.mask((), [], row))
            expected = reference(grammar, committed)
            if not expected:
                break
            assert allowed_in(busy.mask((), [], row)[0]) == expected
            token = rng.choice(sorted(expected))
            busy.commit([token])
            quiet.commit([token])
            committed.append(token)
            assert busy.ended == quiet.ended == (token == EOS)
            if token == EOS:
                break


@pytest.mark.parametrize("name", GRAMMARS)
def test_allowed_counts_what_the_masks_allow(name):
    grammar, rng = GRAMMARS[name], random.Random(f"allowed {name}")
    counts = set()
    for _ in range(14):
        tentative, draft = walk(grammar, rng, rng.randrange(3), stray=0.05), walk(grammar, rng, 5)
        if rng.random() < 0.7:
            draft = walk(grammar, rng, 7, stray=0.1)
            tentative, draft = draft[:2], draft[2:]
        expected = 0
        while expected < len(draft) and draft[expected] in (reference(grammar, [*tentative, *draft[:expected]]) or ()):
            expected += 1
            if draft[expected - 1] == EOS:
                break
        if reference(grammar, tentative) is None:
            expected = 0
        assert constraint(grammar).allowed(tentative, draft) == expected
        counts.add(expected)
    assert len(counts) > 1


@pytest.mark.parametrize(
    ("grammar", "begun", "forced", "ends"),
    [
        (choice_grammar(["the fox", "a dog"]), "the", " fox", True),
        (choice_grammar(["the fox", "a dog"]), "", "", False),
        (json_grammar(PERSON), "", "{", False),
        ('start: "for index in range" /[0-9]/ " and the dog"', "", "for index in range", False),
        ('start: "for index in range" /[0-9]/ " and the dog"', "for index in range7", " and the dog", True),
        (choice_grammar(["the fox"]), "the fox", "", True),
    ],
)
def test_forced_tokens(grammar, begun, forced, ends):
    guide = constraint(grammar)
    guide.commit(ids_of(begun))
    tokens = guide.forced((), 30)
    assert TOKENIZER.decode([token for token in tokens if token != EOS]) == forced
    assert (tokens[-1:] == [EOS]) == ends, "the end is forced where the grammar has ended"
    for limit in range(4):
        assert guide.forced((), limit) == guide.forced((), 30)[:limit]
    for i in range(len(forced)):
        later = guide.forced(ids_of(forced[:i]), 30)
        assert forced[i:].startswith(TOKENIZER.decode([token for token in later if token != EOS]))
    assert guide.forced(ids_of("zzz"), 30) == [], "nothing is forced behind what is not allowed"


def test_forced_tokens_leave_no_other_text():
    for name, grammar in GRAMMARS.items():
        rng = random.Random(f"forced {name}")
        for _ in range(10):
            begun = walk(grammar, rng, rng.randrange(6), stray=0)
            if EOS in begun:
                continue
            found = constraint(grammar).forced(begun, 30)
            text = TOKENIZER.decode([token for token in found if token != EOS])
            at = 0
            for i, token in enumerate(found):
                may = reference(grammar, [*begun, *found[:i]])
                assert token in may
                if token == EOS:
                    assert may == {EOS} and i == len(found) - 1
                    continue
                for other in map(TOKENIZER.decode, may):
                    assert text[at:].startswith(other[: len(text) - at]), "another token would write other text"
                at += len(TOKENIZER.decode([token]))


def test_a11_after_the_end_only_eos_and_after_eos_nothing_is_asked():
    guide = constraint(choice_grammar(["the fox"]))
    tokens = ids_of("the fox")
    logits = torch.randn(len(tokens) + 4, VOCAB_SIZE)
    rows = guide.mask((), [*tokens, EOS, 7, 9], logits)
    assert allowed_in(rows[len(tokens)]) == {EOS}
    assert torch.equal(rows[len(tokens) + 1 :], logits[len(tokens) + 1 :])
    guide.commit(tokens)
    assert not guide.ended
    assert allowed_in(guide.mask((), [EOS], torch.zeros(2, VOCAB_SIZE))[0]) == {EOS}
    assert guide.forced((), 9) == [EOS]
    assert guide.allowed((), [7]) == 0
    assert guide.allowed((), [EOS, 7]) == 1
    assert guide.allowed((), []) == guide.allowed([EOS], [7]) == 0
    for _ in range(3):  # again and again, as a round that is drafted for does
        guide.commit([EOS, 12, 13])
        assert guide.ended
        assert guide.mask((), [5, 6], logits[:3]) is not None
        assert torch.equal(guide.mask((), [5, 6], logits[:3]), logits[:3])
        assert guide.mask([8], [], logits[:1]) is not None
        assert guide.forced((), 9) == []
        assert guide.allowed((), [5, 6]) == 2


def test_a_grammar_that_is_left_is_over():
    guide = constraint(choice_grammar(["the fox"]))
    guide.commit(ids_of("zzz"))
    assert guide.ended


def test_an_end_that_may_wait_allows_eos_and_more():
    guide = constraint(regex_grammar("x+"))
    assert EOS not in allowed_in(guide.mask((), [], torch.zeros(1, VOCAB_SIZE))[0])
    row = guide.mask(ids_of("x"), [], torch.zeros(1, VOCAB_SIZE))[0]
    assert {EOS, *ids_of("x")} <= allowed_in(row)


def test_every_end_of_sequence_token_ends_it():
    both = grammar_tokenizer(TOKENIZER, VOCAB_SIZE, {EOS, 3})
    for grammar, text in ((choice_grammar(["xx"]), "xx"), (regex_grammar("x+"), "xx")):
        guide = constraint(grammar, (EOS, 3), both)
        row = guide.mask(ids_of(text), [], torch.zeros(1, VOCAB_SIZE))[0]
        assert {EOS, 3} <= allowed_in(row), grammar
        assert not {EOS, 3} & allowed_in(guide.mask((), [], torch.zeros(1, VOCAB_SIZE))[0])


@pytest.mark.parametrize(("known", "width"), [(VOCAB_SIZE + 40, VOCAB_SIZE + 40), (VOCAB_SIZE, VOCAB_SIZE + 70)])
def test_a_padded_vocabulary(known, width):
    tokenizer = grammar_tokenizer(TOKENIZER, known, {EOS})
    guide, plain = constraint(GRAMMARS["object"], tokenizer=tokenizer), constraint(GRAMMARS["object"])
    draft = ids_of('{"name": "the')
    rows = guide.mask((), draft, torch.zeros(len(draft) + 1, width))
    expected = plain.mask((), draft, torch.zeros(len(draft) + 1, VOCAB_SIZE))
    assert rows.shape == (len(draft) + 1, width)
    assert torch.equal(rows[:, :VOCAB_SIZE], expected)
    assert (rows[:, VOCAB_SIZE:] == -torch.inf).all(), "ids that are no tokens are in no grammar"
    narrow = plain.mask((), draft, torch.zeros(len(draft) + 1, VOCAB_SIZE - 8))
    assert torch.equal(narrow, expected[:, : VOCAB_SIZE - 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kinds_of_logits(dtype):
    row = constraint(GRAMMARS["choice"]).mask((), [], torch.zeros(1, VOCAB_SIZE, dtype=dtype))
    assert row.dtype == dtype
    assert allowed_in(row[0]) == reference(GRAMMARS["choice"], [])


def test_special_tokens_are_in_no_grammar():
    for grammar in (regex_grammar("(?s:.*)"), json_grammar({"type": "string"})):
        begun = ids_of('"a') if "json" in grammar else ids_of("a")
        may = allowed_in(constraint(grammar).mask(begun, [], torch.zeros(1, VOCAB_SIZE))[0])
        assert not may & {0, 2, 3}
        assert len(may) > 100


# What the grammars take.


def takes(grammar, text):
    """Whether a grammar takes a text as a whole."""
    guide = constraint(grammar)
    tokens = ids_of(text)
    rows = guide.mask((), tokens, torch.zeros(len(tokens) + 1, VOCAB_SIZE))
    return guide.allowed((), tokens) == len(tokens) and EOS in allowed_in(rows[-1])


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (regex_grammar(r"[0-9]+/[a-z]"), ["1/a", "20/z"], ["1", "/a", "1/A", "1/ab", " 1/a"]),
        (regex_grammar("a\\/b"), ["a/b"], ["a\\/b"]),
        (regex_grammar("a\nb"), ["a\nb"], ["anb", "ab"]),
        (regex_grammar("[/]"), ["/"], ["\\"]),
        (
            choice_grammar(["yes", "yes, it is", 'a "b"', "é\n"]),
            ["yes", "yes, it is", 'a "b"', "é\n"],
            ["no", "ye", "yes,"],
        ),
        (json_grammar({"type": "object"}), ["{}", '{"a": [1, {}]}', '{ "a":1 }'], ["[]", "1", "{", '{"a"}', " {}"]),
        (json_grammar({}), ["1", '"a"', "null", "[]", "{}"], ["nul", "{", ""]),
        (json_grammar({"const": 'a"b'}), ['"a\\"b"'], ['"a"']),
        (json_grammar({"type": "string", "pattern": "^[ab]+/$"}), ['"ab/"'], ['"c/"', '"ab"']),
        (GRAMMARS["lark"], ["the dog.", "a b c."], ["the.", "the dog"]),
    ],
)
def test_forms(grammar, good, bad):
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


def test_objects_are_closed_unless_they_say_otherwise():
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    nested = {"type": "object", "properties": {"a": inner, "b": {"type": "array", "items": inner}}, "required": ["a"]}
    closed = json_grammar(nested)
    assert takes(closed, '{"a": {"x": 1}, "b": [{"x": 2}]}')
    for text in (
        '{"a": {"x": 1, "y": 2}}',
        '{"a": {"x": 1}, "c": 2}',
        '{"a": {"x": 1}, "b": [{"x": 2, "y": 1}]}',
        "{}",
    ):
        assert not takes(closed, text), text
    shared = {"$defs": {"i": inner}, "type": "object", "properties": {"a": {"$ref": "#/$defs/i"}}, "required": ["a"]}
    assert takes(json_grammar(shared), '{"a": {"x": 1}}')
    assert not takes(json_grammar(shared), '{"a": {"x": 1, "y": 2}}')
    opened = json_grammar({**inner, "additionalProperties": True})
    assert takes(opened, '{"x": 1, "y": 2}')
    typed = json_grammar({**inner, "additionalProperties": {"type": "boolean"}})
    assert takes(typed, '{"x": 1, "y": true}')
    assert not takes(typed, '{"x": 1, "y": 2}')
    free = json_grammar({"type": "object"})
    assert takes(free, '{"x": 1, "y": 2}'), "an object that names no property takes any"


def test_words_in_a_schema_that_are_no_schemas():
    schema = {"enum": [{"properties": {"a": 1}}], "default": {"properties": {}}}
    assert takes(json_grammar(schema), '{"properties": {"a": 1}}')
    named = {"type": "object", "properties": {"properties": {"type": "integer"}, "enum": {"type": "integer"}}}
    assert takes(json_grammar(named), '{"properties": 1, "enum": 2}')
    assert not takes(json_grammar(named), '{"properties": 1, "other": 2}')


def test_the_callers_schema_is_not_changed():
    before = json.dumps(PERSON)
    json_rule(PERSON)
    assert json.dumps(PERSON) == before


def test_space_between_values_is_free_but_bounded():
    guide = constraint(GRAMMARS["any"])
    space, written = set(map(TOKENIZER.convert_tokens_to_ids, ["Ġ", "ĉ", "Ċ", "č"])), 0
    guide.commit(ids_of("{"))
    while may := allowed_in(guide.mask((), [], torch.zeros(1, VOCAB_SIZE))[0]) & space:
        guide.commit([min(may)])
        written += 1
        assert written <= 40
    assert written == 40
    for text in ('{"name":"a","kind":"the fox"}', '{\n  "name" : "a" ,\n\t"kind" : "the fox"\n}'):
        assert takes(GRAMMARS["object"], text)


# What cannot be had.


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "objekt"}),
        json_grammar({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
        json_grammar({"not": {"type": "string"}}),
        json_grammar({"type": "array", "uniqueItems": True}),
        json_grammar({"type": "integer", "minimum": 5, "maximum": 3}),
        json_grammar({"enum": []}),
        json_grammar({"type": "string", "pattern": "(?=a)b"}),
        regex_grammar("(unclosed"),
        regex_grammar("a(?=b)"),
        "start: (",
        'other: "x"\n',
        "",
    ],
)
def test_what_cannot_be_enforced_is_refused_with_a_sentence(grammar):
    with pytest.raises(ConfigError, match=r"the schema cannot be enforced: .*\w"):
        constraint(grammar)


def test_tokenizers_that_can_and_cannot_be_read():
    assert grammar_tokenizer(byte_level(), len(byte_level()), {1}).vocab_size == len(byte_level())
    assert grammar_tokenizer(sentencepiece(), len(sentencepiece()), {1}).vocab_size == len(sentencepiece())

    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match=re.escape("Slow cannot be decoded under a grammar")):
        grammar_tokenizer(Slow(), 10, {1})
    assert metaspace().is_fast
