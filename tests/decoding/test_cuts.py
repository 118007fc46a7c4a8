"""End-of-sequence, stop and budget in the middle of a round; callbacks; cancellation."""

from __future__ import annotations

import pytest
import torch
from running import run
from toy import ScriptDrafter, ToyModel, script_table

from fly_llm.config import SamplingConfig
from fly_llm.decoding.decode import decode
from fly_llm.decoding.sampling import Sampler
from fly_llm.decoding.verify import Rule

SCRIPT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # the target's text; the prompt is its first two tokens
PROMPT = SCRIPT[:2]
VOCAB = 20


def decode_script(proposals, *, script=SCRIPT, uncertain=(), **options):
    target = ToyModel(script_table(VOCAB, script, uncertain=uncertain), VOCAB)
    options.setdefault("k", 6)
    return run(target, ScriptDrafter(proposals), PROMPT, **options)


def stop_after(token):
    """A `cut` that ends the answer at a token, as a stop string would."""
    return lambda ids: ids.index(token) + 1 if token in ids else None


CASES = [
    # name, options, emitted, finish
    ("eos", {"eos_ids": frozenset({5})}, [2, 3, 4, 5], "stop"),
    ("second eos id", {"eos_ids": frozenset({99, 4})}, [2, 3, 4], "stop"),
    ("budget", {"max_tokens": 3}, [2, 3, 4], "length"),
    ("stop string", {"cut": stop_after(4)}, [2, 3, 4], "stop"),
    ("stop before budget", {"max_tokens": 4, "cut": stop_after(3)}, [2, 3], "stop"),
    ("stop with the last token of the budget", {"max_tokens": 3, "cut": stop_after(4)}, [2, 3, 4], "stop"),
    ("budget before stop", {"max_tokens": 2, "cut": stop_after(5)}, [2, 3], "length"),
    ("the first of two eos ids", {"eos_ids": frozenset({4, 6})}, [2, 3, 4], "stop"),
    ("eos before stop", {"eos_ids": frozenset({3}), "cut": stop_after(5)}, [2, 3], "stop"),
    ("stop before eos", {"eos_ids": frozenset({6}), "cut": stop_after(3)}, [2, 3], "stop"),
    ("eos is the last of the budget", {"max_tokens": 3, "eos_ids": frozenset({4})}, [2, 3, 4], "stop"),
    ("all three", {"max_tokens": 5, "eos_ids": frozenset({5}), "cut": stop_after(4)}, [2, 3, 4], "stop"),
]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("k", [0, 1, 3, 6, 9])
@pytest.mark.parametrize(
    ("options", "emitted", "finish"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_earliest_end_wins(options, emitted, finish, k, window):
    result = decode_script([SCRIPT[2:]] * 9, k=k, rule=Rule(0.3, window), **options)
    assert result.ids == emitted
    assert result.rounds[-1].finish_reason == finish
    assert result.stats.num_output_tokens == len(emitted)
    assert result.target.ids == [*PROMPT, *emitted][:-1]
    assert result.stats.num_accepted_tokens <= result.stats.num_draft_tokens
    assert sum(result.stats.accepted_per_round) == result.stats.num_rounds


def test_the_budget_is_not_drafted_past():
    result = decode_script([SCRIPT[2:]] * 9, k=9, max_tokens=5)
    assert [round_.num_draft_tokens for round_ in result.rounds] == [4]


def test_a_draft_is_cut_after_its_own_end_of_sequence():
    result = decode_script([[2, 3, 17, 5, 6]], eos_ids=frozenset({17}), max_tokens=8)
    assert result.rounds[0].num_draft_tokens == 3


def test_a_relaxed_token_past_the_cut_is_not_reported():
    """The round relaxes position 4 (token 15 for 6), but a stop string ends it before."""
    proposals = [[2, 3, 4, 5, 15, 7, 8]]
    whole = decode_script(proposals, k=9, uncertain=(6,), rule=Rule(0.3, 2), max_tokens=8)
    assert (whole.relaxed, whole.overruled, whole.ids[:7]) == ([4], [6], [2, 3, 4, 5, 15, 7, 8])
    short = decode_script(proposals, k=9, uncertain=(6,), rule=Rule(0.3, 2), cut=stop_after(4))
    assert (short.relaxed, short.overruled, short.ids) == ([], [], [2, 3, 4])


def test_a_rejection_past_the_cut_is_not_reported():
    whole = decode_script([[2, 3, 9, 9]], k=4, max_tokens=6)
    assert whole.rounds[0].rejection == "gate"
    short = decode_script([[2, 3, 9, 9]], k=4, eos_ids=frozenset({3}))
    assert (short.ids, short.rounds[0].rejection, short.stats.num_gate_rejections) == ([2, 3], None, 0)
    cut = decode_script([SCRIPT[2:8]], k=6, cut=stop_after(4))
    assert (cut.stats.num_accepted_tokens, cut.stats.num_draft_tokens, cut.stats.accepted_per_round) == (
        3,
        6,
        [0, 0, 0, 1],
    )


def test_a_certain_mismatch_is_the_gates_however_short_the_draft():
    for n in (1, 2, 6):
        result = decode_script([[9] * n], k=9, rule=Rule(0.3, 6), max_tokens=9)
        assert result.rounds[0].rejection == "gate"
    unsure = decode_script([[9, 3]], k=9, uncertain=(2,), rule=Rule(0.3, 6), max_tokens=9)
    assert unsure.rounds[0].rejection == "window"


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_shortest_draft_that_can_hold_a_window_is_judged(window):
    """A mismatch at the first position of W + 1 drafted tokens is relaxed, of W tokens it is not."""
    proposal = [15, *SCRIPT[3:]]
    for extra, relaxed in ((1, [0]), (0, [])):
        n = window + extra
        result = decode_script([proposal[:n]], k=9, uncertain=(2,), rule=Rule(0.3, window), max_tokens=n + 1)
        assert result.relaxed == relaxed


def test_special_tokens_are_neither_relaxed_nor_relaxed_away():
    proposals = [[2, 3, 4, 5, 15, 7, 8]]
    for protected in ({15}, {6}):  # the draft's token; the target's own
        result = decode_script(proposals, k=9, uncertain=(6,), rule=Rule(0.3, 2, protected_ids=protected), max_tokens=8)
        assert result.relaxed == [] and result.rounds[0].rejection == "protected"


def test_a_forbidden_token_is_never_relaxed():
    config = SamplingConfig(logit_bias={15: float("-inf")})
    result = decode_script([[2, 3, 4, 5, 15, 7, 8]], k=9, uncertain=(6,), rule=Rule(0.3, 2), sampling=config)
    assert result.relaxed == [] and result.rounds[0].rejection == "protected"
    filtered = SamplingConfig(top_k=1)
    result = decode_script([[2, 3, 4, 5, 15, 7, 8]], k=9, uncertain=(6,), rule=Rule(0.3, 2), sampling=filtered)
    assert result.relaxed == []


def test_exact_is_asked_only_when_something_would_be_relaxed_and_is_obeyed():
    asked = []

    def exact(draft_ids, own_ids):
        asked.append((list(draft_ids), list(own_ids)))
        return [i == 4 for i in range(len(draft_ids))]

    options = {"k": 9, "uncertain": (6,), "rule": Rule(0.3, 2), "max_tokens": 8}
    result = decode_script([[2, 3, 4, 5, 15, 7, 8]], exact=exact, **options)
    assert asked == [([2, 3, 4, 5, 15, 7, 8], [2, 3, 4, 5, 6, 7, 8])]
    assert result.relaxed == [] and result.rounds[0].rejection == "protected"
    asked.clear()
    decode_script([[2, 3, 4, 5, 6, 7, 8]], exact=exact, **options)
    assert asked == []


def test_mask_logits_holds_at_every_verified_position():
    """A mask forbids the script's token 5, in the middle of a draft that contains it."""

    def mask(draft_ids, logits):
        assert logits.shape == (len(draft_ids) + 1, VOCAB)
        masked = logits.clone()
        masked[:, 5] = -torch.inf
        masked[:, 11] += 1e-3  # what the flat rest falls to
        return masked

    for k in (0, 6):
        result = decode_script([[2, 3, 4, 5, 6, 7]], k=k, mask_logits=mask, max_tokens=5)
        assert result.ids[:4] == [2, 3, 4, 11]


def test_mask_logits_comes_before_the_filters():
    """With top_k=1 the filter must choose among the allowed tokens, not leave none."""

    def mask(draft_ids, logits):
        return logits.masked_fill(torch.arange(VOCAB) < 12, -torch.inf)

    for sampling in (SamplingConfig(top_k=1), SamplingConfig(temperature=1.0, top_k=1)):
        result = decode_script([[2, 3]], k=3, mask_logits=mask, max_tokens=3, sampling=sampling)
        assert all(token >= 12 for token in result.ids)


def test_relax_copied_false_keeps_lookup_drafts_strict():
    class Copying(ScriptDrafter):
        def propose(self, *args):
            draft = super().propose(*args)
            return type(draft)(draft.ids, copied=True)

    target = ToyModel(script_table(VOCAB, SCRIPT, uncertain=(6,)), VOCAB)
    for allowed in (True, False):
        target.reset()
        drafter = Copying([[2, 3, 4, 5, 15, 7, 8]])
        result = run(target, drafter, PROMPT, k=9, rule=Rule(0.3, 2, relax_copied=allowed), max_tokens=8)
        assert bool(result.relaxed) is allowed


@pytest.mark.parametrize("after", range(1, 12))
def test_cancelling_stops_within_one_forward(after):
    """Whatever forward the flag is raised in - prefill, draft or verification - it is the last one."""
    from running import make_drafter

    forwards = 0

    def count():
        nonlocal forwards
        forwards += 1

    target, draft = (ToyModel(script_table(VOCAB, SCRIPT), VOCAB) for _ in range(2))
    target.on_forward = draft.on_forward = count
    from fly_llm.drafters.base import DraftRequest

    drafter = make_drafter("model", lambda: draft)
    drafter.start(DraftRequest(cancelled=lambda: forwards >= after))
    rounds = list(
        decode(
            target,
            drafter,
            SCRIPT[:8],
            sampler=Sampler(SamplingConfig(), 0, VOCAB),
            max_tokens=50,
            num_speculative_tokens=4,
            prefill_chunk=4,
            cancelled=lambda: forwards >= after,
        )
    )
    assert forwards == after
    assert all(round_.finish_reason is None for round_ in rounds)


def test_nothing_to_decode_is_an_error():
    target = ToyModel(script_table(VOCAB, SCRIPT), VOCAB)
    for prompt, budget in (([], 5), ([1], 0)):
        with pytest.raises(ValueError, match="max_tokens >= 1"):
            list(decode(target, None, prompt, sampler=Sampler(SamplingConfig(), 0, VOCAB), max_tokens=budget))


def test_counters_add_up():
    result = decode_script([[2, 3, 9], [5, 6], [9]], k=4, max_tokens=10)
    stats = result.stats
    assert stats.num_output_tokens == 10 == len(result.ids)
    assert stats.num_draft_tokens == 6 and stats.num_accepted_tokens == 4
    assert stats.accepted_per_round == [stats.num_rounds - 2, 0, 2]
    assert stats.mean_acceptance_length == 10 / stats.num_rounds
    assert stats.acceptance_rate == 4 / 6
