"""Ways to move blocks between instances: tcp, shm, mooncake. The seam is `disagg/link.py`."""

from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.registry import Links

__all__ = ["LinkConfig", "Links"]
