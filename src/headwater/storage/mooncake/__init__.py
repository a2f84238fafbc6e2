"""The `mooncake` backend: blocks in the memory of a Mooncake pool."""
