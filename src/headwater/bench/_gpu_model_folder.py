"""The folder of a model with random weights of a real shape, for servers on the GPU machine."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwater.bench._gpu_engine import make_model, release_memory
from headwater.device import builtin

_MEMORY = Path("/dev/shm")


@contextmanager
def model_folder(shape: str, kept: Path | None) -> Iterator[Path]:
    """A folder with random weights of `shape`: `kept`, which is made if it is missing and stays,
    or a temporary one, on a file system in memory if there is one."""
    if kept is not None:
        if not kept.is_dir():
            part = kept.with_name(f"{kept.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _write(shape, part)
            part.rename(kept)  # so that a folder whose making was interrupted is never used
        yield kept
        return
    parent = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=parent) as name:
        _write(shape, Path(name))
        yield Path(name)


def _write(shape: str, folder: Path) -> None:
    model = make_model(shape)
    module: Any = model.module
    weights = {key: value.cpu() for key, value in module.state_dict().items()}
    if module.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    module.config.architectures = [type(module).__name__]
    module.config.dtype = torch.bfloat16
    module.config.save_pretrained(folder)
    for file in builtin.ensure().iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copy(file, folder)
    del module, model, weights
    release_memory()
