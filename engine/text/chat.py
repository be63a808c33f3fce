"""Chat templates: conversations to prompts with jinja2's sandbox, in the conventions of Hugging
Face.

A template is data from a stranger: no attribute of Python's own is reachable from it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RequestError

DEFAULT_NAME = "default"


class ChatTemplate:
    """One template, or none: then rendering says so."""

    def __init__(self, source: str | None) -> None:
        self.source = source

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ChatTemplate":
        """From tokenizer_config.json's `chat_template`: a text, or a list of named ones."""
        found = config.get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found}
            found = named.get(DEFAULT_NAME)
        return cls(found)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for `messages` ({"role", "content"}), up to where the assistant answers.

        Raises RequestError if there is no template or it refuses the conversation.
        """
        if not self.source:
            raise RequestError(
                "this model has no chat template; give plain prompts (command.chat=false), or put "
                "chat_template into its tokenizer_config.json"
            )
        values = {"add_generation_prompt": True, **variables, "messages": list(messages)}
        try:
            return self._compiled.render(values)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refused the conversation: {error}") from error

    @cached_property
    def _compiled(self) -> Template:
        """Raises TemplateError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        assert self.source is not None
        return environment.from_string(self.source)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
