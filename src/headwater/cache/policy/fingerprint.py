"""A number for every prefix of a path. Equal prefixes have equal numbers, cached or not.

A policy uses the numbers to remember prefixes; matching never uses them: when two prefixes
share a number by chance, the policy guesses worse, but no wrong block is found. All prefixes of
a prompt cost one pass over it.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from headwater.cache.keys import Namespace, TokenPath

_SEED = 0x48656164
_NOT_ZERO = np.uint64(0x9E3779B97F4A7C15)
_MAX_PREFIXES = 1024
"""Number of factors that are prepared at first; doubled when a longer path comes."""


class Fingerprints:
    """Computes the numbers. A path is divided into pieces of `piece_tokens` tokens; each prefix of
    full pieces has a number."""

    def __init__(self, piece_tokens: int, blocks_per_piece: int) -> None:
        self._piece_tokens = piece_tokens
        self._blocks_per_piece = blocks_per_piece
        self._rng = np.random.default_rng(_SEED)
        self._inside = self._factors(piece_tokens)
        self._places = self._factors(_MAX_PREFIXES)
        self._starts: dict[Namespace, np.uint64] = {}

    def of(self, path: TokenPath, num_pieces: int) -> list[int]:
        """The numbers of the first `num_pieces` prefixes, shortest first."""
        if num_pieces > len(self._places):
            more = self._factors(max(len(self._places), num_pieces - len(self._places)))
            self._places = np.concatenate((self._places, more))
        size = self._piece_tokens
        tokens = path.tokens[: num_pieces * size]
        # With an even number of tokens, two at a time are four times as fast.
        pairs = tokens.view(np.uint64) if size % 2 == 0 else tokens.astype(np.uint64)
        pieces = pairs.reshape(num_pieces, -1)
        mixed = pieces.dot(self._inside[: pieces.shape[1]])
        if path.media is not None:
            self._mix_media(mixed, path)
        # Otherwise a prefix of zeros would have the same number at every length.
        mixed += _NOT_ZERO
        mixed *= self._places[:num_pieces]
        mixed[0] ^= self._start(path.namespace)
        numbers: list[int] = np.add.accumulate(mixed).tolist()
        return numbers

    def _mix_media(self, mixed: NDArray[np.uint64], path: TokenPath) -> None:
        for block, media in (path.media or {}).items():
            piece = block // self._blocks_per_piece
            if piece < len(mixed):
                mixed[piece] ^= np.uint64(zlib.crc32(media, block) << 31)

    def _start(self, namespace: Namespace) -> np.uint64:
        """A start value for each namespace, so that the history of one tenant is never used for
        another."""
        start = self._starts.get(namespace)
        if start is None:
            if len(self._starts) >= _MAX_PREFIXES:
                self._starts.clear()
            named = "\0".join(namespace).encode()
            number = zlib.crc32(named) << 32 | zlib.crc32(named, _SEED)
            start = self._starts[namespace] = np.uint64(number)
        return start

    def _factors(self, count: int) -> NDArray[np.uint64]:
        factors: NDArray[np.uint64] = self._rng.integers(
            1, 1 << 64, size=count, dtype=np.uint64
        )
        return factors | np.uint64(1)
