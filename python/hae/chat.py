"""Prompts as a model's chat template renders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hae.errors import USAGE, RecordError, reason
from hae.prompts import Prompt, PromptError

Messages = list[dict[str, Any]]


def rendered(processor: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with the text that the template makes of their messages, up to where the answer
    begins.

    raises RecordError when there is no template, PromptError when it refuses a prompt
    """
    template = _with_template(processor)
    return [_rendered(template, prompt) for prompt in prompts]


def _with_template(processor: Any) -> Any:
    """The processor, or its tokenizer, that carries the template."""
    for reader in (processor, getattr(processor, "tokenizer", None)):
        if getattr(reader, "chat_template", None):
            return reader
    raise RecordError(
        "--chat: the model's folder holds no chat template (chat_template.jinja, or chat_template "
        "in tokenizer_config.json); leave --chat out, or add one",
        USAGE,
    )


def _rendered(template: Any, prompt: Prompt) -> Prompt:
    messages = prompt.messages or [{"role": "user", "content": _content(prompt)}]
    refusal = "leaves out or changes what the messages say"
    # Templates of models with pictures take lists of parts, others strings, and each may drop or
    # garble the other without a word.
    for form in (_with_parts(messages), _with_strings(messages)):
        if form is None:
            continue
        try:
            text = template.apply_chat_template(form, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything
            refusal = f"refused it: {reason(error)}"
            continue
        if all(said.strip() in text for said in _texts(messages)) and "'type'" not in text:
            # The template writes the tokens that begin a text itself.
            return replace(prompt, text=text, special_tokens=False)
    raise PromptError(f"prompt {prompt.name}: the chat template {refusal}")


def _content(prompt: Prompt) -> str | list[dict[str, str]]:
    """The pictures, then the text."""
    if not prompt.images:
        return prompt.text
    return [{"type": "image"}] * len(prompt.images) + [{"type": "text", "text": prompt.text}]


def _with_parts(messages: Messages) -> Messages:
    return [message | {"content": _parts(message)} for message in messages]


def _with_strings(messages: Messages) -> Messages | None:
    """None where there are pictures, which a string cannot say."""
    if any(part["type"] != "text" for message in messages for part in _parts(message)):
        return None
    return [
        message | {"content": "".join(part["text"] for part in _parts(message))}
        for message in messages
    ]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(messages: Messages) -> list[str]:
    parts = [part for message in messages for part in _parts(message)]
    return [part["text"] for part in parts if part["type"] == "text"]
