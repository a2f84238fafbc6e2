"""Links for KV blocks in device memory, which no socket can read or write.

device ── copy ──▶ staging buffers ══ any link ══▶ staging buffers ── copy ──▶ device
"""
