"""What a grammar costs, and what drafting inside it gains.

    python benchmarks/grammar_cost.py --target T --draft D

Plain decoding of JSON, under a grammar and free, for the same number of tokens in turn: time per token, constrained
divided by free. Then the same schemas by strict drafting, with drafts that follow the grammar and with drafts that do
not know it: mean acceptance length, and draft model forwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any
from unittest import mock

from fly_llm import FLyEngine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["engineer", "teacher", "nurse", "farmer", "other"]},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "city": {"type": "string", "maxLength": 30},
                "country_code": {"type": "string", "maxLength": 2},
            },
            "required": ["street", "city", "country_code"],
        },
    },
    "required": ["name", "age", "occupation", "languages", "address"],
}
ORDER = {
    "type": "object",
    "properties": {
        "order_number": {"type": "integer"},
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "product_name": {"type": "string", "maxLength": 40},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                    "unit_price": {"type": "number"},
                },
                "required": ["product_name", "quantity", "unit_price"],
            },
        },
        "is_express_delivery": {"type": "boolean"},
    },
    "required": ["order_number", "items", "is_express_delivery"],
}
ROWS = [
    ("Invent a person and describe them as JSON.", PERSON),
    ("Ada Lovelace, 36, a mathematician in London, speaks English and French. As JSON:", PERSON),
    ("Invent an order of a book shop as JSON.", ORDER),
    ("Three apples at 0.5 each and two pears at 0.75, order 17, not urgent. As JSON:", ORDER),
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the bundled model")
    parser.add_argument("--draft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    engine = FLyEngine.from_pretrained(args.target, args.draft, max_tokens=args.max_tokens, local_files_only=True)
    ratios: list[float] = []
    lengths: dict[str, list[float]] = {"follow the grammar": [], "do not": []}
    forwards = dict.fromkeys(lengths, 0)
    for prompt, schema in ROWS:
        messages = [{"role": "user", "content": prompt}]
        form: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        engine.generate(messages, **form)  # warm up
        for _ in range(args.repeats):
            bound = engine.generate(messages, num_speculative_tokens=0, **form).stats
            free = engine.generate(
                messages, num_speculative_tokens=0, ignore_eos=True, max_tokens=bound.num_output_tokens
            ).stats
            ratios.append(free.tokens_per_second / bound.tokens_per_second)
        for name in lengths:
            guided = mock.patch("fly_llm.request.GuidedDrafter", lambda inner, guide: inner)
            with guided if name == "do not" else mock.MagicMock():
                stats = engine.generate(messages, lossless=True, **form).stats
            lengths[name].append(stats.mean_acceptance_length)
            forwards[name] += stats.num_draft_forwards
        sys.stdout.write(
            f"{prompt[:40]:42} constrained/free {statistics.median(ratios[-args.repeats :]):.3f} {lengths}\n"
        )
        sys.stdout.flush()
    summary = {
        "constrained_over_free": statistics.median(ratios),
        "mean_acceptance_length": {name: statistics.mean(values) for name, values in lengths.items()},
        "draft_forwards": forwards,
    }
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
