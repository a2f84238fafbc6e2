"""Computes block keys of new prompts in a thread of its own, before the engine loop needs them.

A prompt is committed milliseconds after its request arrived, and hashing a long prompt takes
milliseconds. This thread does it in advance, so the loop does not wait. The loop computes a key
that is not there in time, so a slow thread delays nothing and changes nothing.
"""

import threading
from queue import SimpleQueue

from headwater.cache import KeyScheme, TieredCache, TokenPath


class KeyHasher:
    """One thread that hashes prompts in the order in which they came."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._prompts: SimpleQueue[tuple[KeyScheme, TokenPath] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="key-hasher", daemon=True)
        self._thread.start()

    def hash_ahead(self, path: TokenPath) -> None:
        """Compute the keys of all full blocks of `path`, which remembers them. Cached blocks
        have their keys already. Called on the loop's thread; returns at once."""
        if not self._cache.recall_keys(path):
            self._prompts.put((self._cache.scheme, path))

    def close(self) -> None:
        """Stop after the prompts that are queued. Calling it twice is safe."""
        self._prompts.put(None)

    def _work(self) -> None:
        while (prompt := self._prompts.get()) is not None:
            scheme, path = prompt
            scheme.of_path(path, path.num_blocks(scheme.block_tokens))
            del prompt, path  # they hold a whole prompt, and the next one may come much later
