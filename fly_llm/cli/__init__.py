"""The command line: `fly-llm generate`, `fly-llm chat` and `fly-llm info`.

Answers and documents go to standard output, everything else (statistics, notes, errors) to standard error. Nothing here
imports torch before a command needs it, so help and usage errors come at once.
"""

from fly_llm.cli.commands import app, main

__all__ = ["app", "main"]
