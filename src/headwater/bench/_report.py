"""Output of benchmarks: a plain table for people, one JSON object for programs."""

import json
from collections.abc import Mapping
from typing import Any


def print_report(title: str, result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print `result` on standard output, and nothing else when `as_json`."""
    if as_json:
        print(json.dumps(result))
        return
    print(title)
    for name, value in _flat(result):
        print(f"  {name:<32} {_shown(value):>16}")


def _flat(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in result.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name} ")
        else:
            rows.append((prefix + name, value))
    return rows


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4f}"
    if isinstance(value, list):
        return " ".join(_shown(entry) for entry in value)
    return value if isinstance(value, str) else f"{value:,}"
