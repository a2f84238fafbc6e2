"""Weights of the session policy in files: those shipped with Headwater, and those of an
operator.

A file is JSON. It names the traces from which its weights were learned, so that a benchmark
never uses one of them to evaluate these weights.
"""

import hashlib
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from headwater.cache.policy.weights import Weights
from headwater.errors import ConfigError

_VERSION = 1
_MAX_BYTES = 1 << 20
_DIGITS = 4


def load_weights(name: str) -> Weights | None:
    """The weights in the file `name`; for `shipped` those that come with Headwater, for `none`
    None."""
    if name == "none":
        return None
    try:
        if name == "shipped":
            text = (
                resources.files("headwater.cache.policy").joinpath("weights.json").read_text()
            )
        else:
            with Path(name).open(encoding="utf-8") as file:
                text = file.read(_MAX_BYTES)
        return _parse(json.loads(text))
    except OSError as exc:
        raise ConfigError(f"--weights {name} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, ConfigError) as exc:
        raise ConfigError(f"--weights {name} is not a file of weights: {exc}") from exc


def save_weights(weights: Weights, path: Path) -> None:
    """Write `weights` to a file for `load_weights`."""
    saved = {
        "version": _VERSION,
        "learned_from": list(weights.learned_from),
        "bias": np.round(weights.bias, _DIGITS).tolist(),
        "features": np.round(weights.features, _DIGITS).tolist(),
    }
    try:
        path.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--save-weights {path} cannot be written: {exc.strerror}") from exc


def save_learned(weights: Weights, path: Path, *, before: Weights | None, trace: Path) -> None:
    """Write the weights learned from `trace`, starting from `before`."""
    seen = () if before is None else before.learned_from
    save_weights(replace(weights, learned_from=(*seen, _trace_digest(trace))), path)


def _trace_digest(path: Path) -> str:
    """The name of the trace in `path` in a file of weights."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_unseen(weights: Weights | None, trace: Path) -> None:
    """Raise ConfigError if `weights` were learned from `trace`: a result on it would prove
    nothing."""
    if weights is not None and _trace_digest(trace) in weights.learned_from:
        raise ConfigError(
            f"these weights were learned from {trace}: a result on it would prove nothing; use another trace"
        )


def _parse(saved: Any) -> Weights:  # noqa: ANN401 -- whatever the file holds
    if saved["version"] != _VERSION:
        raise ValueError(f"it has version {saved['version']}, expected {_VERSION}")
    return Weights(
        bias=np.array(saved["bias"], dtype=np.float64),
        features=np.array(saved["features"], dtype=np.float64),
        learned_from=tuple(str(digest) for digest in saved["learned_from"]),
    )
