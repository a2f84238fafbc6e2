"""Renders the Helm chart of this project: the part of Go's templates that its files use.

`{{ .Values.a.b }}`, `{{ $name.field }}`, `if`/`else`/`end`, `range $key, $value := …`,
`range $value := …`, `toYaml X | indent N`, `X | quote` and the trimming dash. Anything else is an
error, so the chart cannot use what is not rendered here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_TAG = re.compile(r"(\{\{-?)\s*(.*?)\s*(-?\}\})", re.S)


def render(chart: Path, values: Mapping[str, Any], release: str) -> list[dict[str, Any]]:
    """All documents of the chart with these values over its defaults."""
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    context = {"Values": _merged(defaults, values), "Release": {"Name": release}}
    documents = []
    for path in sorted((chart / "templates").glob("*.yaml")):
        text = _Template(path.read_text()).render(context)
        documents += [one for one in yaml.safe_load_all(text) if one is not None]
    return documents


def _merged(base: Any, over: Any) -> Any:
    """Merge values like Helm: mappings by key, anything else is replaced."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {
            key: _merged(base[key], over[key])
            if key in base and key in over
            else over.get(key, base.get(key))
            for key in {**base, **over}
        }
    return over


class _Template:
    def __init__(self, text: str) -> None:
        self._pieces = list(_pieces(text))

    def render(self, context: Mapping[str, Any]) -> str:
        text, end = self._run(0, {"": context, "$": context})
        assert end == len(self._pieces), "an end without a beginning"
        return text

    def _run(self, at: int, names: Mapping[str, Any]) -> tuple[str, int]:
        """Render up to `end` or `else` of this level; return the text and its position."""
        parts: list[str] = []
        while at < len(self._pieces):
            kind, content = self._pieces[at]
            if kind == "text":
                parts.append(content)
            elif content in ("end", "else"):
                return "".join(parts), at
            elif content.startswith("if "):
                text, at = self._if(at, names)
                parts.append(text)
            elif content.startswith("range "):
                text, at = self._range(at, names)
                parts.append(text)
            else:
                parts.append(_write(content, names))
            at += 1
        return "".join(parts), at

    def _if(self, at: int, names: Mapping[str, Any]) -> tuple[str, int]:
        holds = bool(_value(self._pieces[at][1][3:], names))
        first, at = self._run(at + 1, names)
        second = ""
        if self._pieces[at][1] == "else":
            second, at = self._run(at + 1, names)
        assert self._pieces[at][1] == "end"
        return first if holds else second, at

    def _range(self, at: int, names: Mapping[str, Any]) -> tuple[str, int]:
        found = re.fullmatch(r"range (?:\$(\w+), )?\$(\w+) := (\S+)", self._pieces[at][1])
        assert found, self._pieces[at][1]
        key, name, where = found.groups()
        items = _value(where, names)
        pairs = sorted(items.items()) if isinstance(items, Mapping) else enumerate(items)
        parts, end = [], self._run(at + 1, _Unknown(names))[1]
        for index, item in pairs:
            text, end = self._run(at + 1, {**names, f"${key}": index, f"${name}": item})
            parts.append(text)
        return "".join(parts), end


class _Unknown(dict[str, Any]):
    """Names while a loop is skipped: every name is empty."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        super().__init__(names)

    def __missing__(self, name: str) -> Any:
        return _Nothing()


class _Nothing(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return _Nothing()


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    for tag in _TAG.finditer(text):
        before = text[at : tag.start()]
        yield "text", before.rstrip() if tag[1] == "{{-" else before
        yield "tag", tag[2]
        at = tag.end()
        if tag[3] == "-}}":
            at += len(text[at:]) - len(text[at:].lstrip())
    yield "text", text[at:]


def _write(content: str, names: Mapping[str, Any]) -> str:
    if found := re.fullmatch(r"toYaml (\S+) \| indent (\d+)", content):
        text = yaml.safe_dump(_plain(_value(found[1], names)), default_flow_style=None).rstrip()
        return "\n".join(" " * int(found[2]) + line for line in text.splitlines())
    if found := re.fullmatch(r"(\S+) \| quote", content):
        return yaml.safe_dump(str(_value(found[1], names)), default_style='"').rstrip()
    assert re.fullmatch(r"[\w.$]+", content), f"not rendered here: {content}"
    return str(_value(content, names))


def _plain(value: Any) -> Any:
    return None if isinstance(value, _Nothing) else value


def _value(path: str, names: Mapping[str, Any]) -> Any:
    head, *fields = path.split(".")
    value = names[head]
    for field in fields:
        value = value[field]
    return value
