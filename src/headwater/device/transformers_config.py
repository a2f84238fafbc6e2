"""The configuration of a model folder, as transformers has it."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, PretrainedConfig

from headwater.device.families import ALIASES
from headwater.device.model_files import read_config

LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""What every loader is told: nothing is fetched, and no code of a folder is run."""


def transformers_config(folder: Path) -> PretrainedConfig:
    """The folder's config.json. A family with an alias is read as the one that it is."""
    known: Any = AutoConfig
    raw = read_config(folder)
    kind = ALIASES.get(raw.pop("model_type"))
    if kind is not None:
        return cast(PretrainedConfig, known.for_model(kind, **raw))
    return cast(PretrainedConfig, known.from_pretrained(folder, **LOCAL))
