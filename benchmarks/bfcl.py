"""Tool calls on rows of the Berkeley Function Calling Leaderboard: FLy at its loosest beside strict and plain decoding.

    python benchmarks/bfcl.py --target T --draft D --data bfcl.jsonl

Each row is answered freely (`tool_choice="auto"`) by all three, and under a grammar (`"required"`) by FLy and strict.
Greedy, so the figures do not depend on what else the machine does. Counts the rows whose calls are all accepted
by the reference, the relaxed tokens by zone (none may be in a call), and rows where FLy's forced calls are strict's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fly_llm import FLyEngine, Result

LOOSEST = {"theta": 0.0, "window": 1}
METHODS: dict[str, dict[str, Any]] = {
    "fly": LOOSEST,
    "strict": {"lossless": True},
    "plain": {"num_speculative_tokens": 0},
    "fly, forced": {**LOOSEST, "tool_choice": "required"},
    "strict, forced": {"lossless": True, "tool_choice": "required"},
}


def accepted(result: Result, reference: list[dict[str, Any]]) -> bool:
    """Whether the calls are those of the reference, in any order, with arguments that it accepts."""
    open_calls = list(reference)
    for call in result.tool_calls:
        fitting = next((one for one in open_calls if call.name in one and _fits(call.arguments, one[call.name])), None)
        if fitting is None:
            return False
        open_calls.remove(fitting)
    return not open_calls


def _fits(arguments: dict[str, Any], accepted_values: dict[str, list[Any]]) -> bool:
    if set(arguments) - set(accepted_values):
        return False
    return all(
        _same(arguments[name], values) if name in arguments else "" in values
        for name, values in accepted_values.items()
    )


def _same(value: Any, values: list[Any]) -> bool:
    """Text is compared without case and space, as the leaderboard does."""
    plain = json.dumps(value, sort_keys=True).lower().replace(" ", "")
    return any(plain == json.dumps(one, sort_keys=True).lower().replace(" ", "") for one in values)


def main() -> None:
    """Measure, and print a line per row and a JSON summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--skip", type=int, default=0, help="rows to leave out at the start, of a run that was stopped")
    parser.add_argument("--rows", type=int, help="how many rows after those")
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    engine = FLyEngine.from_pretrained(args.target, args.draft, max_tokens=args.max_tokens, local_files_only=True)
    rows = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()][args.skip :][: args.rows]
    right: Counter[str] = Counter()
    zones: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for row in rows:
        parallel = len(row["reference"]) > 1
        results = {
            name: engine.generate(row["messages"], tools=row["meta"]["tools"], parallel_tool_calls=parallel, **settings)
            for name, settings in METHODS.items()
        }
        for name, result in results.items():
            right[name] += accepted(result, row["reference"])
            sums[f"{name}: rounds"] += result.stats.num_rounds
            sums[f"{name}: tokens"] += result.stats.num_output_tokens
            sums[f"{name}: invalid calls"] += len(result.invalid_tool_calls)
            zones.update(relaxation.zone for relaxation in result.relaxations)
        same = results["fly, forced"].token_ids == results["strict, forced"].token_ids
        sums["forced the same"] += same
        sums["free the same as strict"] += results["fly"].token_ids == results["strict"].token_ids
        sums["strict the same as plain"] += results["strict"].token_ids == results["plain"].token_ids
        sys.stdout.write(f"{row['id']:36} right {dict(right)} relaxed by zone {dict(zones)} forced the same {same}\n")
        sys.stdout.flush()
    summary = {"rows": len(rows), "right": dict(right), "relaxed_by_zone": dict(zones), **sums}
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
