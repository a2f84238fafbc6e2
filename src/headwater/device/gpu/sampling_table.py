"""Sampling parameters of the requests being served, as arrays.

A request keeps one `SamplingParams` object for all its steps. Its fields are read once; a step
then uses rows of arrays instead of reading attributes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.device.penalties import is_penalised
from headwater.scheduler.request import SamplingParams

Floats = NDArray[np.float32]

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTS = ("top_k", "min_tokens")
_SEED_MASK = (1 << 64) - 1


class EditList(NamedTuple):
    """Values that are added to logits of a row."""

    ids: NDArray[np.int32]
    amounts: Floats


class SamplingTable:
    """An entry for each `SamplingParams` object. The table is bounded: it is cleared when it is
    full."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._index: dict[int, int] = {}
        # While the references are kept, the ids of the objects are not reused.
        self._params: list[SamplingParams] = []
        self.floats = {name: np.zeros(max_entries, dtype=np.float32) for name in _FLOATS}
        self.ints = {name: np.zeros(max_entries, dtype=np.int64) for name in _INTS}
        self.seeds = np.zeros(max_entries, dtype=np.uint64)
        self.is_random = np.zeros(max_entries, dtype=bool)
        self.is_penalised = np.zeros(max_entries, dtype=bool)
        self.has_bias = np.zeros(max_entries, dtype=bool)
        self.num_logprobs = np.full(max_entries, -1, dtype=np.int64)
        self.num_edits = np.zeros(max_entries, dtype=np.int64)
        """Maximum number of listed edits, not counting the model's end tokens."""

        self.is_plain = np.zeros(max_entries, dtype=bool)
        """Whether each entry is greedy without further parameters."""

    def entries(self, params: Sequence[SamplingParams]) -> NDArray[np.int64]:
        """The entry of each of `params`, valid until the next call."""
        index = self._index
        try:
            return np.array([index[id(p)] for p in params], dtype=np.int64)
        except KeyError:
            self._add_all(params)
            return np.array([self._index[id(p)] for p in params], dtype=np.int64)

    def edit_list(
        self, entry: int, eos_token_ids: Sequence[int], *, forbids_ends: bool
    ) -> EditList:
        """Biases of an entry and, if it must not end yet, its end tokens at negative
        infinity."""
        params = self._params[entry]
        amounts = dict(params.logit_bias)
        if forbids_ends:
            ends = () if params.ignore_eos else tuple(eos_token_ids)
            amounts.update(dict.fromkeys(params.stop_token_ids + ends, float("-inf")))
        return EditList(
            np.fromiter(amounts, dtype=np.int32, count=len(amounts)),
            np.fromiter(amounts.values(), dtype=np.float32, count=len(amounts)),
        )

    def _add_all(self, params: Sequence[SamplingParams]) -> None:
        new = {id(p): p for p in params if id(p) not in self._index}
        if len(self._params) + len(new) > self._max_entries:
            self._index.clear()
            self._params.clear()
            new = {id(p): p for p in params}
        for key, p in new.items():
            self._index[key] = len(self._params)
            self._set(len(self._params), p)
            self._params.append(p)

    def _set(self, at: int, params: SamplingParams) -> None:
        for name, values in self.floats.items():
            values[at] = getattr(params, name)
        for name, whole in self.ints.items():
            whole[at] = min(getattr(params, name), np.iinfo(np.int32).max)
        self.seeds[at] = params.seed & _SEED_MASK
        self.is_random[at] = not params.is_greedy
        self.is_penalised[at] = is_penalised(params)
        self.has_bias[at] = bool(params.logit_bias)
        has_edits = bool(params.logit_bias) or params.min_tokens > 0
        num_edits = len(params.logit_bias) + len(params.stop_token_ids)
        self.num_edits[at] = num_edits if has_edits else 0
        self.num_logprobs[at] = -1 if params.logprobs is None else params.logprobs
        self.is_plain[at] = (
            params.is_greedy
            and params.logprobs is None
            and params.min_tokens == 0
            and not params.logit_bias
            and not self.is_penalised[at]
            and not params.grammar
        )
