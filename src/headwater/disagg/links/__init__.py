"""How blocks move between instances: `tcp`, `shm` and `mooncake`, behind one interface."""
