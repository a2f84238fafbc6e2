"""The user's cache folder. Files and folders appear there complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """`HEADWATER_CACHE`, or `~/.cache/headwater`. This call does not create it."""
    named = os.environ.get("HEADWATER_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "headwater"


@contextmanager
def filled_whole(target: Path) -> Iterator[Path]:
    """A context with a temporary folder beside `target`. It is renamed to `target` at the end,
    unless there was an error.

    When two processes race, the first to finish wins and the other's work is dropped:
    `target` is complete whenever it exists.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_whole(target: Path, text: str) -> None:
    """Write `target` so that a reader sees the old text or the new, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).replace(target)
