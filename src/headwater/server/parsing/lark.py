"""Lark grammars for llguidance: the calls of each format, and reasoning before an answer.

A grammar writes JSON as chat templates do, with `", "` and `": "`, so that a call has the
same tokens when it comes back in the history.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.server.parsing.base import Terminal, ToolSpec

_TEMPLATE_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def quoted(text: str) -> str:
    """A string literal of a grammar."""
    return json.dumps(text)


def arguments_rule(name: str, parameters: Mapping[str, Any]) -> str:
    """A rule for an arguments object as text."""
    schema = {"type": "object", **parameters, "x-guidance": _TEMPLATE_JSON}
    if not schema.get("patternProperties"):
        schema.setdefault("additionalProperties", False)  # no argument beyond the schema
    return f"{name}: %json {json.dumps(schema)}"


def _value_rule(name: str, schema: Any, root: Mapping[str, Any]) -> str:  # noqa: ANN401 -- a schema
    """A rule for one value; references in it point into `root`."""
    whole = dict(schema) if isinstance(schema, Mapping) else {}
    for key in ("$defs", "definitions"):
        if key in root:
            whole.setdefault(key, root[key])
    return f"{name}: %json {json.dumps({**whole, 'x-guidance': _TEMPLATE_JSON})}"


def calls_grammar(
    tools: Sequence[ToolSpec],
    write: Callable[[int, ToolSpec], tuple[str, list[str]]],
    *,
    parallel: bool,
    separator: str = "",
    around: tuple[str, str] = ("", ""),
) -> str:
    """The rule `calls`, with one alternative per tool. `write` returns the right side of a
    tool's rule and the rules that it uses."""
    rules: list[str] = []
    for index, tool in enumerate(tools):
        body, others = write(index, tool)
        rules += [f"call_{index}: {body}", *others]
    one = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = f" ({separator} call)*" if parallel else ""
    first, last = around
    return "\n".join([f"calls: {first} call{more} {last}".rstrip(), f"call: {one}", *rules])


def json_call(index: int, tool: ToolSpec, *, arguments_key: str) -> tuple[str, list[str]]:
    """`{"name": …, "arguments": …}` as terms, and the rule of the arguments."""
    head = '{"name": ' + json.dumps(tool.name) + f', "{arguments_key}": '
    rule = arguments_rule(f"args_{index}", tool.parameters)
    return f"{quoted(head)} args_{index} {quoted('}')}", [rule]


def tagged_arguments(
    index: int, tool: ToolSpec, *, before: Callable[[str], str], after: str
) -> tuple[str, list[str]]:
    """Arguments written one by one between tags: text as it is, other values as JSON."""
    parameters = tool.parameters
    required = set(parameters.get("required", ()))
    terms: list[str] = []
    rules: list[str] = []
    for number, (key, schema) in enumerate(parameters.get("properties", {}).items()):
        name = f"value_{index}_{number}"
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        if is_text and "enum" in schema:
            options = " | ".join(quoted(str(option)) for option in schema["enum"])
            rules.append(f"{name}: {options}")
        elif is_text:
            rules.append(f"{name}: /[^<]*/")
        else:
            rules.append(_value_rule(name, schema, parameters))
        term = f"{quoted(before(key))} {name} {quoted(after)}"
        terms.append(term if key in required else f"({term})?")
    return " ".join(terms), rules


def special_or_text(special_ids: Mapping[str, int]) -> Terminal:
    """Writes a marker as its special token if the vocabulary has one, otherwise as text."""

    def terminal(marker: str) -> str:
        token = special_ids.get(marker)
        return quoted(marker) if token is None else f"<[{token}]>"

    return terminal
