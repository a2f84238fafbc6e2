"""Finds the layers of a checkpoint that are the experts of one mixture, which transformers joins."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"(.+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_PART = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Other names of the parts, as in Mixtral."""

_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The layers of all experts of one mixture."""

    module: str
    """Name of the experts in the model."""

    gate: tuple[str, ...]
    """By expert."""

    up: tuple[str, ...]
    down: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.gate + self.up + self.down


def expert_layers(layers: Iterable[str]) -> list[ExpertLayers]:
    """The mixtures of which every part of every expert is among `layers`."""
    found: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in layers:
        if (match := _NAME.fullmatch(name)) is not None:
            prefix, expert, part = match.groups()
            found[prefix][_PART.get(part, part)][int(expert)] = name
    complete = []
    for prefix, parts in found.items():
        numbers = list(range(len(parts["down_proj"])))
        if all(sorted(parts[part]) == numbers for part in _PARTS):
            gate, up, down = (tuple(parts[part][n] for n in numbers) for part in _PARTS)
            module = f"{prefix}mlp.experts"
            complete.append(ExpertLayers(module=module, gate=gate, up=up, down=down))
    return complete
