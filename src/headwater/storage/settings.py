"""Turns the operator's settings (JSON, environment) into a backend's frozen settings."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from headwater.errors import ConfigError

Settings = TypeVar("Settings")

_UNITS = {
    unit: 1 << (10 * power)
    for power, units in enumerate((("", "b"), ("k",), ("m",), ("g",), ("t",)))
    for letter in units
    for unit in ((letter, f"{letter}b", f"{letter}ib") if power else (letter,))
}


def read_settings(kind: type[Settings], given: Mapping[str, Any], backend: str) -> Settings:
    """The settings `given`, as an instance of `kind`. Raises ConfigError that names the wrong
    setting."""
    hints = get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            close = difflib.get_close_matches(name, sorted(fields), n=1)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"known: {', '.join(sorted(fields))}"
            )
            raise ConfigError(f"storage backend {backend!r} has no setting {name!r}; {hint}")
    values = {
        name: _convert(backend, name, value, hints[name]) for name, value in given.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        missing = ", ".join(re.findall(r"'(\w+)'", str(error))) or str(error)
        raise ConfigError(f"storage backend {backend!r} needs the setting {missing}") from error


def parse_bytes(text: str | int | float) -> int:
    """A number of bytes: 4096, "512MiB", "16 GB" (the same as GiB: 1024 times 1024 …)."""
    if isinstance(text, int | float):
        return int(text)
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(
            f"{text!r} is not a number of bytes; write for example 512MiB or 16GiB"
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _convert(backend: str, name: str, value: Any, hint: Any) -> Any:  # noqa: ANN401 - JSON
    if name.endswith("_bytes") and value is not None:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(
                f"{name} of storage backend {backend!r} must be a number of bytes, got {value!r}"
            )
        return parse_bytes(value)
    allowed = getattr(hint, "__args__", (hint,))
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in allowed:
        wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
        raise ConfigError(
            f"{name} of storage backend {backend!r} must be of type {wanted}, got {value!r}"
        )
    return value
