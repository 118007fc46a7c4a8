"""Plain, strict and FLy decoding of the same prompts by a target and a draft model, interleaved in one run.

    python benchmarks/groups.py --target T --draft D --data humaneval.jsonl:3 spec_bench.jsonl:3:rag --out rows.jsonl

Rows are JSON lines with "id", "task", "messages" and "meta"; FILE:N takes N rows, FILE:N:GROUP those of one
`meta.group`. Prints a table per group: mean acceptance length, relaxed share, decode time per token as times faster
than plain decoding (medians over repeats, then the geometric mean over rows), and the share of decode time outside
model forwards. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fly_llm import FLyEngine, Result

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "strict": {"lossless": True},
    "fly": {},
}


def read_rows(spec: str) -> tuple[str, list[dict[str, Any]]]:
    """The rows named by FILE[:N[:GROUP]]."""
    name, *rest = spec.split(":")
    rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
    group = rest[1] if len(rest) > 1 else None
    if group:
        rows = [row for row in rows if row["meta"].get("group") == group]
    return group or Path(name).stem, rows[: int(rest[0]) if rest else None]


class ForwardTimer:
    """Wall time inside the forwards of some models; meaningful where they are synchronous, on a CPU."""

    def __init__(self, models: list[Any]) -> None:
        self.seconds = 0.0
        self._start = 0.0
        for model in models:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start


def measure(result: Result, forward_seconds: float) -> dict[str, Any]:
    """What is kept of one answer. Target prefill is no decoding; the draft model's is."""
    stats = result.stats
    outside = stats.decode_seconds - (forward_seconds - stats.prefill_seconds)
    return {
        "tokens": stats.num_output_tokens,
        "rounds": stats.num_rounds,
        "relaxed": stats.num_relaxed_tokens,
        "seconds_per_token": stats.decode_seconds / stats.num_output_tokens,
        "draft_share": stats.draft_seconds / stats.decode_seconds,
        "other_share": outside / stats.decode_seconds,
        "finish_reason": result.finish_reason,
        "token_ids": list(result.token_ids),
        "text": result.text,
    }


def run(engine: FLyEngine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method on every row, method by method within a row, repeated."""
    rows = []
    engine.generate("Warm up.", max_tokens=16)
    pair = engine.load()._handle.models.pair()
    timer = ForwardTimer([loaded.model for loaded in (pair.target, pair.draft) if loaded])
    for spec in args.data:
        group, data = read_rows(spec)
        for row in data:
            runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
            for _ in range(args.repeats):
                for method, options in METHODS.items():
                    timer.seconds = 0.0
                    result = engine.generate(row["messages"], max_tokens=args.max_tokens, **options)
                    runs[method].append(measure(result, timer.seconds))
            rows.append({"group": group, "id": row["id"], "runs": runs})
            taus = {m: round(r[0]["tokens"] / r[0]["rounds"], 2) for m, r in runs.items()}
            same = runs["plain"][0]["token_ids"] == runs["strict"][0]["token_ids"]
            print(f"{group:15} {row['id']!s:24} tau {taus} strict = plain: {same}", flush=True)
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Per group and method: tau, relaxed share, times faster than plain, shares of time."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for group in [*dict.fromkeys(row["group"] for row in rows), "all"]:
        chosen = [row for row in rows if group in (row["group"], "all")]
        table[group] = {}
        for method in METHODS:
            firsts = [row["runs"][method][0] for row in chosen]
            ratios = [_seconds(row, "plain") / _seconds(row, method) for row in chosen]
            every = [run for row in chosen for run in row["runs"][method]]
            tokens = sum(run["tokens"] for run in firsts)
            table[group][method] = {
                "tau": tokens / sum(run["rounds"] for run in firsts),
                "relaxed_share": sum(run["relaxed"] for run in firsts) / tokens,
                "times_faster": math.exp(statistics.fmean(map(math.log, ratios))),
                "slowest_row": min(ratios),
                "draft_share": statistics.fmean(run["draft_share"] for run in every),
                "other_share": statistics.fmean(run["other_share"] for run in every),
            }
    return table


def _seconds(row: dict[str, Any], method: str) -> float:
    return statistics.median(run["seconds_per_token"] for run in row["runs"][method])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE[:N[:GROUP]]")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chat-template", help="a Jinja template or its file, for models that have none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = FLyEngine.from_pretrained(
        args.target,
        args.draft,
        dtype=args.dtype,
        chat_template=args.chat_template,
        local_files_only=True,
        prefix_cache_bytes=0,  # every method reads the prompt itself
    )
    rows = run(engine, args)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table = summarise(rows)
    print(f"\n{'group':15} {'method':8} {'tau':>6} {'relaxed':>8} {'faster':>7} {'worst':>6} {'draft':>6} {'other':>6}")
    for group, methods in table.items():
        for method, cell in methods.items():
            print(
                f"{group:15} {method:8} {cell['tau']:6.2f} {cell['relaxed_share']:8.2%} {cell['times_faster']:7.2f} "
                f"{cell['slowest_row']:6.2f} {cell['draft_share']:6.1%} {cell['other_share']:6.2%}"
            )
    print(json.dumps({"table": table, "torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
