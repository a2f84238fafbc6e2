"""Structured output: a constraint on the answer, as a grammar.

A request asks for JSON, a schema, a pattern, one of several texts, or a grammar. Each becomes
one text in llguidance's format, which is part of the sampling parameters. It is compiled where
masks are made, not here.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.engine.grammar import to_lark
from headwater.errors import RequestError

MAX_GRAMMAR_BYTES = 1 << 17
"""Longest grammar, including schemas."""

_MAX_SCHEMA_DEPTH = 64
"""Deepest nesting of a schema."""

_MAX_CHOICES = 1024

_WHITESPACE = r"[ \n\r\t]{0,20}"
"""White space between the parts of JSON. Bounded, because some models would write white space
for ever."""

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The constraint on an answer: exactly one of the fields is set.

    Raises RequestError, naming the field, if it cannot become a grammar. Whether a schema or a
    pattern is supported is known only when it is compiled.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as an object or as text; `True` allows any JSON value."""

    json_object: bool = False
    """Any JSON object."""

    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """A grammar in Lark syntax or in GBNF."""

    def __post_init__(self) -> None:
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(_FIELDS)
            raise RequestError(f"give exactly one of {names}; got {', '.join(given) or 'none'}")

    def to_grammar(self) -> str:
        """The grammar as text. The same content gives the same text."""
        # Checked before any work, which could take seconds for a text of megabytes.
        check_schema_size(self.json, self.regex, self.choice, self.grammar)
        text = json.dumps({"grammars": [self._part()]}, ensure_ascii=False)
        if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise _too_long(MAX_GRAMMAR_BYTES)
        return text

    def _part(self) -> dict[str, Any]:
        if self.json_object:
            return _schema_part(_ANY_OBJECT)
        if self.json is not None:
            return _schema_part(_read_schema(self.json))
        if self.choice is not None:
            return {"lark_grammar": "start: " + _alternatives(self.choice)}
        if self.regex is not None:
            _check_text("regex", self.regex)
            return {"lark_grammar": f"start: /{_slashes_escaped(self.regex)}/"}
        assert self.grammar is not None, "one of the fields is given"
        _check_text("grammar", self.grammar)
        return {"lark_grammar": to_lark(self.grammar)}


_FIELDS = ("json", "json_object", "regex", "choice", "grammar")


def check_schema_size(*parts: object, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise RequestError when the JSON of `parts` is longer than `max_bytes` or nested too
    deeply. The rest of such `parts` is not read."""
    left, todo = max_bytes, [(part, 0) for part in parts]
    while todo:
        value, depth = todo.pop()
        inner: Collection[object] = ()
        if isinstance(value, Mapping):
            left -= sum(len(str(key)) for key in value)
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        left -= len(value) if isinstance(value, str) else 1 + len(inner)
        if left < 0:
            raise _too_long(max_bytes)
        if depth >= _MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"the JSON schema has more than {_MAX_SCHEMA_DEPTH} nested levels; simplify it"
            )
        todo += [(entry, depth + 1) for entry in inner]


def lark_grammar(rules: str) -> str:
    """A grammar made of Lark rules, one of which is `start`."""
    return json.dumps({"grammars": [{"lark_grammar": rules}]}, ensure_ascii=False)


def with_prefix(grammar: str, prefix: str, rules: str = "") -> str:
    """`grammar` after `prefix`, which consists of Lark terms that may use `rules`."""
    parts = json.loads(grammar)["grammars"]
    parts[0] = {"name": "answer", **parts[0]}
    lark = f"start: {prefix} @answer\n{rules}"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]}, ensure_ascii=False)


def _schema_part(schema: object) -> dict[str, Any]:
    if isinstance(schema, Mapping):
        options = {"whitespace_pattern": _WHITESPACE}
        schema = {**schema, "x-guidance": options}
    return {"json_schema": schema}


def _read_schema(schema: object) -> object:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as exc:
            raise RequestError(f"the JSON schema is not JSON: {exc}") from exc
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise RequestError(f"a JSON schema must be an object, got {type(schema).__name__}")
    check_schema_size(schema)
    return schema


def _too_long(max_bytes: int) -> RequestError:
    return RequestError(f"the grammar is longer than {max_bytes} bytes; simplify it")


def _alternatives(choice: Sequence[str]) -> str:
    if isinstance(choice, str) or not all(isinstance(text, str) for text in choice):
        raise RequestError(f"choice must be a list of texts, got {choice!r:.100}")
    if not 1 <= len(choice) <= _MAX_CHOICES or not all(choice):
        raise RequestError(
            f"choice must have 1 to {_MAX_CHOICES} texts and none may be empty, got {len(choice)} "
            f"texts, {sum(not text for text in choice)} of them empty"
        )
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} must be a text that is not empty, got {text!r:.40}")


def _slashes_escaped(pattern: str) -> str:
    """`pattern` with each `/` escaped, because `/` ends a pattern in Lark."""
    escaped: list[str] = []
    is_escape = False
    for sign in pattern:
        escaped.append("\\/" if sign == "/" and not is_escape else sign)
        is_escape = sign == "\\" and not is_escape
    return "".join(escaped)
