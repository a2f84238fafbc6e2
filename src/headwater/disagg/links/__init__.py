"""How blocks move between instances: `tcp`, `shm`, `cuda` and `mooncake`, behind one
interface."""
