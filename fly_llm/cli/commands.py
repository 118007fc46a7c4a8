"""The commands."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from fly_llm.cli.options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    LocalFilesOnly,
    Options,
    TrustRemoteCode,
    Verbose,
    with_options,
)
from fly_llm.cli.output import (
    Printer,
    clean,
    document,
    error_console,
    note,
    output_console,
    print_json,
    reporting,
    statistics,
)
from fly_llm.errors import PromptError, TokenizerMismatchError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.", show_default="none")]


def main() -> None:
    """The entry point `fly-llm`."""
    app(prog_name="fly-llm")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fly-llm {importlib.metadata.version('fly-llm')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Local language models, sped up by loose speculative decoding (FLy)."""


@app.command()
@with_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer; - reads it from stdin.")],
    options: Options,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as it stands, not as a chat turn.")] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt.

    The answer goes to stdout as it is committed, statistics to stderr.
    On a terminal, text that only the relaxed rule kept is underlined.
    """
    if raw and system is not None:
        raise typer.BadParameter("--raw completes the prompt alone: leave out one of the two", param_hint="--system")
    knobs = options.knobs()
    text = sys.stdin.read() if prompt == "-" else prompt
    request = clean(text) if raw else _turns(clean(text), system)
    engine = options.engine()
    if as_json:
        print_json(document(engine.generate(request, **knobs)))
        return
    printer, result = Printer(output_console()), None
    with engine.stream(request, **knobs) as stream:
        for event in stream:
            printer.write(event)
            result = event.result
    printer.end()
    if options.stats and result is not None:
        note(error_console(), statistics(result))


def _turns(text: str, system: str | None) -> list[dict[str, str]]:
    """The messages of a single question; the newline that ends a piped text is no part of it."""
    if not text.strip():
        raise PromptError("the prompt is empty: give some text, or complete nothing with --raw")
    messages = [{"role": "user", "content": text.rstrip("\r\n")}]
    return messages if system is None else [{"role": "system", "content": clean(system)}, *messages]


@app.command()
@with_options
def chat(options: Options, system: System = None) -> None:
    """Talk with a model, turn by turn.

    Type /help for the commands; /theta 0.2, for one, changes a setting.
    Ctrl-C stops an answer and keeps what it has; /exit or Ctrl-D ends.
    Lines may be piped in. Answers alone go to stdout, the rest to stderr.
    """
    from fly_llm.cli.chat import Chat

    system = None if system is None else clean(system)
    Chat(options.engine(), options.knobs(), system=system, stats=options.stats).run()


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Hub name, folder, GGUF file, or default.")] = DEFAULT_MODEL,
    draft: Annotated[str | None, typer.Argument(help="A draft model for it.", show_default="none")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    local_files_only: LocalFilesOnly = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say what a model is, and whether a draft model fits it, without loading weights.

    Ends with exit code 1 if the tokenizers of the two differ.
    """
    with reporting(verbose=verbose):
        from fly_llm.cli.info import examine, facts
        from fly_llm.models.options import LoadOptions

        options = LoadOptions(
            dtype=dtype, device_map=device, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
        found = examine(None if model == DEFAULT_MODEL else model, draft, options)
        if as_json:
            print_json(found)
        else:
            parts = [facts(found[role]) for role in ("target", "draft") if found[role]]
            if found["compatible"]:
                parts.append("the tokenizers agree: the second can draft for the first")
            sys.stdout.write("\n\n".join(parts) + "\n")
        if found["problem"]:
            raise TokenizerMismatchError(found["problem"])
