"""Finds models by their Hugging Face name, in the local cache or by one download.

Only safetensors and the small text files beside them are downloaded, never code. The libraries'
own variables apply: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.device.families import check_served
from headwater.device.model_files import StoredTensor, read_config, weight_files
from headwater.errors import ConfigError, HeadwaterError, ModelError, PackageMissing

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SMALL = ["*.json", "*.jinja", "*.txt"]
_WANTED = [*_SMALL, "*.safetensors"]
_SUBFOLDERS = ["*/*"]
"""Files in subfolders are never needed: they are other formats of the same weights."""


def is_hub_name(model: str) -> bool:
    """Whether `model` is a name such as `Qwen/Qwen3-8B` and not an existing folder."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


class FoundModel(NamedTuple):
    """The folder of a model, and its name for clients."""

    folder: str | None
    """None means the built-in model."""

    name: str | None
    """None means the last part of the folder's path."""


def find_model(model: str | None, revision: str | None = None) -> FoundModel:
    """The folder of a model; downloads it if necessary.

    A folder, or None for the built-in model, is used unchanged. A name is looked up in the
    cache and downloaded if it is not there. Raises ModelError with the reason if the model is
    not available, if possible before anything large is downloaded.
    """
    if model is None or not is_hub_name(model):
        if revision is not None:
            raise ConfigError(
                "--revision needs a Hugging Face name as the model; leave it out for a local folder"
            )
        return FoundModel(model, None)
    folder = cached_folder(model, revision)
    if folder is None:
        with _Translated(model, revision):
            check_served(read_config(_download(model, revision, _SMALL)))
            folder = _download(model, revision, _WANTED)
        weight_files(folder)
    return FoundModel(str(folder), model)


def remote_tensors(model: str, revision: str | None) -> tuple[Path, list[StoredTensor], int]:
    """The small files of a model, its tensors and the number of their files. Only the headers
    of the weights are downloaded."""
    with _Translated(model, revision):
        folder = _download(model, revision, _SMALL)
        found = _api().get_safetensors_metadata(model, revision=folder.name)
    tensors = [
        StoredTensor(name=name, kind=tensor.dtype, shape=tuple(tensor.shape))
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    ]
    return folder, tensors, len(found.files_metadata)


def cached_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a model that is in the cache with all its weights; None otherwise."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(model, revision, _WANTED, local_files_only=True)
        weight_files(folder)
    except (LocalEntryNotFoundError, ModelError):
        return None
    return folder


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    return _snapshot(model, revision, patterns, local_files_only=False)


def _snapshot(
    model: str, revision: str | None, patterns: list[str], *, local_files_only: bool
) -> Path:
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented there

    if not sys.stderr.isatty():
        disable_progress_bars()
    return Path(
        _api().snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_SUBFOLDERS,
            local_files_only=local_files_only,
        )
    )


def _api() -> "HfApi":
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as exc:
        raise PackageMissing(exc, feature="a model by its name", extra="engine") from exc
    return HfApi(library_name="headwater")


class _Translated:
    """Turns errors of the hub into one sentence each that says what to do."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._what = model if revision is None else f"{model} at revision {revision}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:  # noqa: ANN401
        if not isinstance(error, Exception) or isinstance(error, HeadwaterError):
            return
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            reason = (
                "its owner requires consent: accept the terms on its page, then set HF_TOKEN"
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = "there is no such revision"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "there is no such model, or it is private and HF_TOKEN is not set"
        elif isinstance(error, errors.NotASafetensorsRepoError):
            reason = "it has no .safetensors weights"
        else:
            # Raised by several libraries: sockets, HTTP, files of the cache.
            reason = (
                f"the hub cannot be reached ({_first_line(error)}); download it where there "
                f"is a "
                "network (hf download) and give the folder"
            )
        raise ModelError(
            f"{self._what} is not in the local cache and was not downloaded: {reason}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
