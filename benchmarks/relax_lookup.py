"""Should tokens that prompt lookup sends straight to the target be relaxed? Scores and rounds, prompt lookup alone.

    python benchmarks/relax_lookup.py --target T --data gsm8k.jsonl:12 spec_bench.jsonl:6:rag

Greedy, so the figures do not depend on what else the machine does. Prints per file and setting: rounds per token,
relaxed tokens, answers that reached the token limit, and for gsm8k the number of right answers.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from groups import read_rows

from fly_llm import FLyEngine

SETTINGS: dict[str, dict[str, Any]] = {
    "strict": {"lossless": True},
    "relaxed": {"relax_lookup": True},
}


def is_right(text: str, reference: Any) -> bool:
    """Whether the number after the last #### is the reference."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return bool(found) and float(found[-1].replace(",", "")) == float(reference)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE[:N[:GROUP]]")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    engine = FLyEngine.from_pretrained(args.target, drafting="lookup", max_tokens=args.max_tokens, prefix_cache_bytes=0)
    for spec in args.data:
        group, rows = read_rows(spec)
        sums = {name: {"rows": 0, "tokens": 0, "rounds": 0, "relaxed": 0, "limit": 0, "right": 0} for name in SETTINGS}
        for row in rows:
            for name, settings in SETTINGS.items():
                result = engine.generate(row["messages"], **settings)
                cell = sums[name]
                cell["rows"] += 1
                cell["tokens"] += result.stats.num_output_tokens
                cell["rounds"] += result.stats.num_rounds
                cell["relaxed"] += result.stats.num_relaxed_tokens
                cell["limit"] += result.finish_reason == "length"
                if group == "gsm8k":
                    cell["right"] += is_right(result.text, row["reference"])
            print(json.dumps({"group": group, "id": row["id"], **sums}), flush=True)
        for name, cell in sums.items():
            print(f"{group:10} {name:26} rounds/token {cell['rounds'] / cell['tokens']:.3f} {cell}", flush=True)


if __name__ == "__main__":
    main()
