"""Simple models of the cache: a dict of blocks, without tree or arrays."""


class NaiveLru:
    """One tier, block by block: least recently used first, within a path the deepest first."""

    def __init__(self, capacity, block_tokens):
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.last_use = {}
        self.leased = {}
        self.held = 0
        self.tick = 0

    def blocks(self, tokens):
        """The blocks of `tokens`; each is all tokens up to its end."""
        size = self.block_tokens
        return [tuple(tokens[: end + size]) for end in range(0, len(tokens) - size + 1, size)]

    def match(self, tokens, max_blocks):
        found = 0
        for block in self.blocks(tokens)[:max_blocks]:
            if block not in self.last_use:
                break
            found += 1
        return found

    def lease(self, blocks):
        for block in blocks:
            self.leased[block] = self.leased.get(block, 0) + 1

    def take(self, count):
        free = self.capacity - len(self.last_use) - self.held
        if count <= free:
            self.held += count
            return True
        idle = [b for b in self.last_use if not self.leased.get(b)]
        if count > free + len(idle):
            return False
        idle.sort(key=lambda b: (self.last_use[b], -len(b)))
        for block in idle[: count - free]:
            del self.last_use[block]
        self.held += count
        return True

    def commit(self, blocks):
        """Publish held blocks under a lease; return how many were published already."""
        surplus = 0
        for block in blocks:
            if block in self.last_use:
                surplus += 1
            else:
                self.last_use[block] = self.tick
                self.held -= 1
        self.lease(blocks)
        return surplus

    def release(self, blocks, held):
        self.tick += 1
        self.held -= held
        for block in blocks:
            self.leased[block] -= 1
            self.last_use[block] = self.tick
