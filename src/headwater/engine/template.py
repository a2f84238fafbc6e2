"""The chat template of a model, run in Jinja's sandbox.

Offers what templates in the field expect: `raise_exception`, `strftime_now`, a plain `tojson`,
loop controls and the `generation` tag. A template that fails is the request's fault.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headwater.errors import ModelError, RequestError


class ChatTemplate:
    """One compiled template; rendering changes nothing."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ModelError(f"the model's chat template does not compile: {exc}") from exc

    @classmethod
    def find(cls, folder: Path, settings: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a model directory, wherever it is kept, or None."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"))
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("default")
        return cls(source) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> str:
        """The prompt text; raises RequestError where the template refuses the messages."""
        names = {
            **settings,
            **special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        names.setdefault("tools", None)
        names.setdefault("documents", None)
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            raise RequestError(f"the chat template refused these messages: {exc}") from exc
        except (RecursionError, OverflowError, ArithmeticError) as exc:
            raise RequestError("the chat template could not be applied") from exc


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; serving prints the body."""

    tags = {"generation"}  # noqa: RUF012 -- declared so by jinja2.ext.Extension

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
