"""The `file` backend: blocks in slab files of one directory that several processes share."""
