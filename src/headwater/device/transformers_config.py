"""The configuration of a model folder, in transformers' form."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, PretrainedConfig

from headwater.device.families import ALIASES
from headwater.device.model_files import read_config

LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every loader: nothing is downloaded, and no code of a folder is run."""


def transformers_config(folder: Path) -> PretrainedConfig:
    """The folder's config.json. An alias is replaced by the family that it stands for."""
    known: Any = AutoConfig
    raw = read_config(folder)
    kind = ALIASES.get(raw.pop("model_type"))
    if kind is not None:
        return cast(PretrainedConfig, known.for_model(kind, **raw))
    return cast(PretrainedConfig, known.from_pretrained(folder, **LOCAL))
