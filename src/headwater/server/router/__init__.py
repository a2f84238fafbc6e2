"""The router: forwards requests to many instances, in its own process."""
