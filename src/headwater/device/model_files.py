"""Reads a model folder without torch: its config.json, and the headers of its weights.

A safetensors file begins with the length of a JSON header, which describes each tensor by type,
shape and position. The weights themselves are not read here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows."""

_INDEX = "model.safetensors.index.json"

_ELEMENT_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}
"""Bits per element of each type in safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a weights file."""

    name: str
    kind: str
    """Name of the type in safetensors, such as `BF16`."""

    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _ELEMENT_BITS[self.kind] // 8


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ModelError if something is wrong with it."""
    path = folder / "config.json"
    if not path.is_file():
        if not folder.exists():
            raise ModelError(f"model folder {folder} does not exist; give another path")
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json; give another path"
        )
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """A file with one JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those in its index, otherwise all in the folder."""
    index = folder / _INDEX
    if index.is_file():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"{index} has no weight_map; download the file again")
        # Only the file name is used: an index must not name files outside its folder.
        files = [folder / Path(str(name)).name for name in sorted(set(names.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(files)} weight files are missing, "
            f"the first is {missing[0]}; download the model again"
        )
    if not files:
        raise ModelError(f"{folder} has no .safetensors weights; use a complete model folder")
    return files


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of one file. Raises ModelError if the file is damaged or truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(
                f"{path} is not a safetensors file, or is truncated; download it again"
            )
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            tensor = StoredTensor(name=name, kind=entry["dtype"], shape=tuple(entry["shape"]))
            end = 8 + header_bytes + int(entry["data_offsets"][1])
            if end > size or tensor.num_bytes < 0:
                raise ModelError(
                    f"{path} is truncated: tensor {name} ends after the file; download it again"
                )
            yield tensor
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise ModelError(
            f"{path} has a damaged safetensors header: {exc!r}; download it again"
        ) from exc
