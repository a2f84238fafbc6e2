"""Collects the errors that users see from the source. `python -m tests.error_list` writes
docs/errors.md; a test checks that the page is up to date."""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headwater"
PAGE = ROOT / "docs" / "errors.md"

GROUPS = {
    "Refused requests": (
        ("RequestRefused", "RequestError", "PromptTooLong", "QueueFull"),
        "The client gets the status and an OpenAI error object with this message.",
    ),
    "Settings": (
        ("ConfigError",),
        "The command prints the message and exits with 1 before anything is served.",
    ),
    "Model folders": (
        ("ModelError",),
        (
            "The command prints the message and exits with 1; a reload answers it with 400. Most "
            "messages mean that files are missing, do not fit each other, or have a format that "
            "is not served: download the model again, or use another one."
        ),
    ),
}
_STATUS = {"RequestError": 400, "PromptTooLong": 400, "QueueFull": 429, "RequestRefused": 400}
_HEAD = """\
# Errors

Every error message that a client or an operator can get, collected from the code.
`{…}` stands for a value. An unexpected error is a 500 for clients, with details in the log.
"""


@dataclass(frozen=True, order=True)
class UserError:
    """One message of the source."""

    module: str
    message: str
    kind: str
    status: int | None
    code: str

    @property
    def line(self) -> str:
        """Its row in the table."""
        message = self.message.replace("|", "\\|").replace("\n", " ")
        if self.status is None:
            return f"| {message} | `{self.module}` |"
        code = f"{self.status} `{self.code}`" if self.code else str(self.status)
        return f"| {code} | {message} | `{self.module}` |"


def collect() -> list[UserError]:
    """All messages, sorted by module."""
    kinds = {kind for names, _ in GROUPS.values() for kind in names}
    found = set()
    for path in SOURCE.rglob("*.py"):
        module = str(path.relative_to(SOURCE))
        if module.startswith(("bench/", "testing/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _name(node.func) in kinds and node.args:
                message = _text(node.args[0])
                if any(letter.isalpha() for letter in message):
                    found.add(_error(module, message, node))
    return sorted(found)


def page() -> str:
    """The content of docs/errors.md."""
    errors, parts = collect(), [_HEAD]
    for title, (kinds, about) in GROUPS.items():
        rows = [error for error in errors if error.kind in kinds]
        has_status = any(row.status is not None for row in rows)
        head = (
            "| status | message | where |\n|---|---|---|"
            if has_status
            else "| message | where |\n|---|---|"
        )
        parts.append(
            f"## {title}\n\n{about}\n\n{head}\n" + "\n".join(r.line for r in rows) + "\n"
        )
    return "\n".join(parts)


def _error(module: str, message: str, call: ast.Call) -> UserError:
    kind = _name(call.func)
    given = {word.arg: word.value for word in call.keywords}
    status, code = _STATUS.get(kind), ""
    if isinstance(given.get("status"), ast.Constant):
        status = given["status"].value  # type: ignore[attr-defined]  # checked in this line
    if isinstance(given.get("code"), ast.Constant):
        code = str(given["code"].value)  # type: ignore[attr-defined]  # checked in this line
    return UserError(module, message, kind, status, code)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _text(node: ast.expr) -> str:
    """A message with `{…}` for its values; empty if it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + (_text(node.right) or "{…}")
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in node.values
        )
    return ""


if __name__ == "__main__":
    PAGE.write_text(page())
