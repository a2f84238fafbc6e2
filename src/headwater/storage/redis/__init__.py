"""The `redis` backend: blocks as values of a Redis or Valkey server."""
