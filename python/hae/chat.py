"""Prompts as a model's chat template renders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hae.errors import USAGE, RecordError, reason
from hae.prompts import Prompt, PromptError


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
    try:
        text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise PromptError(
            f"prompt {prompt.name}: the chat template refused it: {reason(error)}"
        ) from None
    # The template writes the tokens that begin a text itself.
    return replace(prompt, text=text, special_tokens=False)


def _content(prompt: Prompt) -> str | list[dict[str, str]]:
    """The pictures, then the text. Templates of models without pictures take a string."""
    if not prompt.images:
        return prompt.text
    return [{"type": "image"}] * len(prompt.images) + [{"type": "text", "text": prompt.text}]
