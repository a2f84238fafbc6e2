"""Links for blocks in a device's own memory, which no socket reads or writes.

device ── copy ──▶ buffers ══ any link ══▶ buffers ── copy ──▶ device
"""

from headwater.disagg.staged.links import StagedLinks

__all__ = ["StagedLinks"]
