"""Loads other weights for a model that is being served, with the same shape."""

from pathlib import Path

from headwater.device.model import LoadedModel, load
from headwater.errors import ModelError

_MUST_AGREE = (
    *("num_layers", "kv_heads", "head_dim", "vocab_size"),
    *("max_model_len", "eos_token_ids", "dtype"),
)
"""Properties that pools, scheduler and server depend on."""


def load_like(model: LoadedModel, folder: Path) -> LoadedModel:
    """The model in `folder`, loaded beside `model`. Raises ModelError if it has another shape.

    The served model is not touched, so an unusable folder changes nothing.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    other = load(folder, dtype=dtype, device=str(model.device), has_fp8_kv=model.has_fp8_kv)
    for name in _MUST_AGREE:
        old, new = getattr(model, name), getattr(other, name)
        if old != new:
            raise ModelError(
                f"{folder} has another shape: {name} is {new}, but the served model has {old}; start another server for it"
            )
    if _tokenizer(model.model_dir) != _tokenizer(folder):
        raise ModelError(f"{folder} has another tokenizer; start another server for it")
    return other


def _tokenizer(folder: Path) -> bytes | None:
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else None
