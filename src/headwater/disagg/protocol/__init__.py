"""The hand-off protocol: messages, their encoding, and state machines without I/O."""
