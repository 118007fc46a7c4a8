"""Messages to token ids, through the chat template of the model.

A template is a program that came with the weights, and it may refuse what it is given: a system turn, two user turns in
a row, an answer to go on with. So a conversation is rendered as it was given first, and reshaped only as far as the
template demands. What is in a message is text and stays text: control tokens spelled out in it are encoded as ordinary
characters, so a retrieved document cannot forge a turn.

A tokenizer is not safe to share between threads (encoding sets switches on it): the caller sees to it that one thread
at a time uses one. Nothing here takes a lock.
"""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from fly_llm.errors import PromptError
from fly_llm.text.messages import SYSTEM, Message, check_text, normalise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("fly_llm")

# Continuing an answer cuts off whatever the template writes behind it. A template that trims contents would trim the
# end of the answer as well; a character that is no space, put there by the template itself, protects that end.
_KEEP_END = "{% set messages = messages[:-1] + [dict(messages[-1], content=messages[-1]['content'] ~ '.')] +%}"
_reshaped: weakref.WeakSet[PreTrainedTokenizerBase] = weakref.WeakSet()  # tokenizers already written about in the log


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Renders a conversation as the prompt for the assistant's next words.

    A last assistant message is continued, not closed: the answer goes on where it ends. An empty one asks for a new
    answer. Where the template refuses the conversation, or leaves out a system message without a word, neighbouring
    messages of one role are merged, and if that does not help, system messages move into the first user message; this
    is logged once per tokenizer, at debug level.

    Args:
        tokenizer: the target's tokenizer. It is used by one thread at a time; see the module.
        messages: mappings with "role" (system, developer, user, assistant, tool) and "content" (a string, None, or a
            list of strings and text parts, which are joined by newlines). Other keys, "tool_calls" for one, reach the
            template as they are; arguments of tool calls written as a JSON object become that object. Never changed.
        tools: JSON schemas of the tools the model may call.
        documents: retrieved documents, for the few templates that have a place for them.
        chat_template: a Jinja template, or the name of one of the tokenizer's, instead of the tokenizer's own.
        template_kwargs: variables for the template, `enable_thinking` for one.

    Returns:
        The token ids of the prompt. The template writes the beginning-of-sequence token; none is added to it.

    Raises:
        PromptError: there are no messages, one is malformed or not text, the model has no chat template, its template
            refuses the conversation however it is put, or the tokenizer cannot protect it against forged turns.
    """
    turns = normalise(messages)
    if chat_template is None and not tokenizer.chat_template:
        raise PromptError(
            "the model has no chat template (it may be a base model, not an instruct model), so messages cannot be "
            "rendered: pass chat_template=, or send the prompt as a plain str, which is completed as it stands"
        )
    settings = signature(tokenizer.apply_chat_template).parameters
    if "sanitize_control_tokens" not in settings:  # it would pass for a template variable and protect nothing
        raise PromptError(
            f"{type(tokenizer).__name__} cannot keep control tokens in messages apart from the template's own: use a "
            "tokenizer made of a tokenizer.json, or send the prompt as a plain str"
        )
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise PromptError(f"chat_template_kwargs must be a dict of template variables, got {template_kwargs!r:.80}")
    if clash := sorted(settings.keys() & set(template_kwargs or ())):
        raise PromptError(f"template_kwargs may not set {', '.join(clash)}: they decide how the prompt is made")
    variables = {**(template_kwargs or {}), "tools": _plain(tools), "documents": _plain(documents)}
    try:
        template = tokenizer.get_chat_template(chat_template, variables["tools"])
    except ValueError as error:  # several templates and no default
        raise PromptError(f"cannot choose a chat template: {error}") from error
    if not re.search(r"""["']developer["']""", template):
        turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]

    def apply(turns: list[Message], **options: Any) -> Any:
        chosen = {"chat_template": template, **variables, **options}
        if chosen.get("tokenize", True):
            chosen["tokenizer_kwargs"] = {"verbose": False}  # the engine says itself, and better, what is too long
        return tokenizer.apply_chat_template(turns, return_dict=False, **chosen)

    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    _refuse_forged_keys(control, (turns, variables))
    ids = _first_accepted(tokenizer, turns, template, apply)
    for name in ("tools", "documents"):
        if variables[name] and ids == _without(name, tokenizer, turns, template, apply):
            raise PromptError(
                f"the model's chat template has no place for {name}=, so the model would never see them: put them into "
                "a message, or pass a chat_template= that renders them"
            )
    return ids


def _without(
    name: str, tokenizer: PreTrainedTokenizerBase, turns: list[Message], template: str, apply: Callable[..., Any]
) -> list[int] | None:
    """The ids of the same prompt without one variable, or None if the template cannot do without it."""
    options: dict[str, Any] = {name: None}
    try:
        return _first_accepted(tokenizer, turns, template, partial(apply, **options))
    except PromptError:
        return None


_OWN_KEYS = frozenset(
    [
        "role",
        "content",
        "name",
        "tools",
        "documents",
        "tool_calls",
        "tool_call_id",
        "id",
        "type",
        "function",
        "arguments",
        "parameters",
        "properties",
        "description",
        "required",
        "items",
        "enum",
    ]
)
"""Keys of messages and tools themselves, which nobody forges; an added token may be part of one."""


def _refuse_forged_keys(control: Sequence[str], value: Any) -> None:
    """Keys of dicts (arguments of tool calls, properties of schemas) are the one place transformers does not sanitise.

    Raises:
        PromptError: a key spells a control token, which would forge a turn.
    """
    if isinstance(value, Mapping):
        for key in value:
            for token in control:
                if isinstance(key, str) and key not in _OWN_KEYS and token in key:
                    raise PromptError(f"the key {key!r:.80} spells the control token {token!r}: rename it")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _refuse_forged_keys(control, item)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encodes a prompt that is completed as it stands, control tokens in it included.

    Args:
        tokenizer: the target's tokenizer. It is used by one thread at a time; see the module.
        text: the prompt. A beginning-of-sequence token at its start is not doubled.

    Returns:
        Its token ids with the special tokens the tokenizer puts in front. An end-of-sequence token that the tokenizer
        puts behind is left out: it would end the answer before its first word. No text is the beginning-of-sequence
        token or, where the tokenizer has none, the end-of-sequence token, so that there is something to go on from.

    Raises:
        PromptError: the text is not valid, or there is nothing to encode and the tokenizer has neither of these tokens.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids: list[int] = list(tokenizer(check_text(text, "the prompt"), verbose=False)["input_ids"]) if text else []
    if bos is not None and ids[:2] == [bos, bos] and text.lstrip().startswith(str(tokenizer.bos_token)):
        ids = ids[1:]
    around: list[int] = tokenizer("")["input_ids"]
    if len(around) > (bos == eos) and around[-1] == eos:
        ids = ids[:-1]
    if ids:
        return ids
    if bos is None and eos is None:
        raise PromptError(
            "the prompt is empty, and the tokenizer has no beginning- or end-of-sequence token to start from: "
            "give at least one word"
        )
    return [bos if bos is not None else eos]


def _plain(items: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    """An empty list becomes None: some templates take any list of tools for a reason to talk about tools."""
    return list(items) if items else None


def _first_accepted(
    tokenizer: PreTrainedTokenizerBase, turns: list[Message], template: str, apply: Callable[..., Any]
) -> list[int]:
    """Ids of the first way to put the conversation that the template accepts whole."""
    from jinja2 import TemplateError, TemplateSyntaxError

    go_on = turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]
    if go_on and not turns[-1]["content"]:
        turns, go_on = turns[:-1], False
        if not turns:
            raise PromptError("the only message is an empty assistant message: there is nothing to answer")
    refusal: Exception | None = None
    for render in _continuations(template, apply) if go_on else [partial(apply, add_generation_prompt=True)]:
        for how, attempt in _attempts(turns):
            try:
                if _drops_system(attempt, render):
                    refusal = PromptError("it leaves out a system message")
                    continue
                ids = list(render(attempt, sanitize_control_tokens=True))
            except TemplateSyntaxError as error:
                raise PromptError(f"the chat template is not valid Jinja (line {error.lineno}): {error}") from error
            except (TemplateError, TypeError, ValueError) as error:
                refusal = error
                continue
            if how and tokenizer not in _reshaped:
                _reshaped.add(tokenizer)
                logger.debug("the chat template does not take the conversation as given (%s): %s", refusal, how)
            return ids
    raise PromptError(f"the chat template refuses these messages: {refusal}") from refusal


def _continuations(template: str, apply: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Two ways to render up to the end of the last message, the assistant's, without what closes it.

    The template's own way comes first. A template that refuses a last word of the assistant's, or rewrites it (cuts out
    its reasoning, say), renders the turns before it, and the answer is put behind the opened turn.
    """

    def within(turns: list[Message], **options: Any) -> Any:
        answer = turns[-1]["content"]
        protected = _KEEP_END + template if answer != answer.rstrip() else template
        return apply(turns, continue_final_message=True, chat_template=protected, **options)

    def behind(turns: list[Message], **options: Any) -> Any:
        # Jinja drops the newline that ends a template; the answer must not bring it back.
        longer = template.removesuffix("\n") + "{{ answer_to_continue }}"
        options |= {"add_generation_prompt": True, "answer_to_continue": turns[-1]["content"]}
        return apply(turns[:-1], chat_template=longer, **options)

    return [within, behind]


def _attempts(turns: list[Message]) -> Iterator[tuple[str, list[Message]]]:
    """The conversation as given, then reshaped more and more; shapes that change nothing are skipped."""
    yield "", turns
    if any("tool_calls" in turn for turn in turns):
        yield "arguments of tool calls were written as JSON text", [_with_text_arguments(turn) for turn in turns]
    merged = _merged(turns)
    if len(merged) < len(turns):
        yield "messages of one role in a row were merged", merged
    if any(turn["role"] in SYSTEM for turn in turns):
        yield "system messages were moved into the first user message", _merged(_folded(turns))


def _with_text_arguments(turn: Message) -> Message:
    """A message whose calls have their arguments as text, for templates that put them together with text."""
    if "tool_calls" not in turn:
        return turn
    calls = []
    for call in turn["tool_calls"]:
        function = call.get("function", call)
        written = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
        calls.append({**call, "function": written} if "function" in call else written)
    return {**turn, "tool_calls": calls}


def _merged(turns: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for turn in turns:
        last = merged[-1] if merged else None
        same = last is not None and last["role"] == turn["role"] and turn["role"] != "tool"
        if last is not None and same and "tool_calls" not in last and "tool_calls" not in turn:
            merged[-1] = {**last, "content": _joined(last["content"], turn["content"])}
        else:
            merged.append(turn)
    return merged


def _folded(turns: list[Message]) -> list[Message]:
    system = _joined(*(turn["content"] for turn in turns if turn["role"] in SYSTEM))
    rest = [turn for turn in turns if turn["role"] not in SYSTEM]
    for index, turn in enumerate(rest):
        if turn["role"] == "user":
            return [*rest[:index], {**turn, "content": _joined(system, turn["content"])}, *rest[index + 1 :]]
    return [{"role": "user", "content": system}, *rest]


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _drops_system(turns: list[Message], render: Callable[..., Any]) -> bool:
    """Whether the template renders without error but leaves out a system message.

    Markers stand in for the system texts, since a template may well change a text that it does not drop. It is a second
    rendering, without encoding: cheap next to reading the prompt, and it asks about this very conversation.
    """
    marks = {i: f"SYSTEM{i}MARK" for i, turn in enumerate(turns) if turn["role"] in SYSTEM and turn["content"]}
    if not marks:
        return False
    probe = [{**turn, "content": marks.get(i, turn["content"])} for i, turn in enumerate(turns)]
    rendered = render(probe, tokenize=False)
    return not all(mark in rendered for mark in marks.values())
