"""Time to the first token of a conversation's second turn, with and without the cache of the first.

The first turn has `--tokens` tokens of a public-domain text before its question. The second is then asked cold and
going on from the first one's cache, over several conversations.

    python benchmarks/prefix_reuse.py --target Qwen/Qwen2.5-Coder-1.5B-Instruct --draft Qwen/Qwen2.5-Coder-0.5B-Instruct
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from fly_llm import FLyEngine, Result

TEXT = Path(__file__).parent.parent / "examples" / "data" / "digital_services_playbook.md"
SETTINGS = {"lossless": True, "max_tokens": 24}


def timed(engine: FLyEngine, messages: list[dict[str, str]], **options: Any) -> tuple[float, Result]:
    """Seconds to the first token, and the answer."""
    start = time.perf_counter()
    first = 0.0
    with engine.stream(messages, **SETTINGS, **options) as events:
        for event in events:
            first = first or time.perf_counter() - start
            if event.result is not None:
                return first, event.result
    raise AssertionError("a stream without a result")


def main() -> None:
    """Measure, and print a line per repeat and a JSON summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="default: the bundled model")
    parser.add_argument("--draft")
    parser.add_argument("--chat-template", help="a Jinja template or its file, for models that have none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    engine = FLyEngine.from_pretrained(
        args.target, args.draft, dtype=args.dtype, chat_template=args.chat_template, local_files_only=True
    )
    words = TEXT.read_text("utf-8").split(" ")
    size = len(words)
    while engine.count_tokens([{"role": "user", "content": " ".join(words[:size])}]) > args.tokens:
        size = size * 19 // 20
    ratios, same = [], []
    for i in range(args.repeats):  # each with a text that no earlier one begins with
        text = f"Text number {i}: {' '.join(words[:size])}\n\nSum this up in one sentence."
        first = [{"role": "user", "content": text}]
        answer = {"role": "assistant", "content": engine.generate(first, **SETTINGS).text}
        second = [*first, answer, {"role": "user", "content": "Now in five words."}]
        cold, fresh = timed(engine, second, prefix_cache_bytes=0)
        warm, reused = timed(engine, second)
        ratios.append(warm / cold)
        same.append(reused.token_ids == fresh.token_ids)
        sys.stdout.write(
            f"cold {cold:.3f} s, reused {warm:.3f} s, ratio {warm / cold:.3f}, {reused.usage.cached_tokens} of "
            f"{reused.usage.prompt_tokens} tokens reused, same answer: {same[-1]}\n"
        )
    summary = {"prompt_tokens": fresh.usage.prompt_tokens, "ratio": statistics.median(ratios), "same": all(same)}
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
