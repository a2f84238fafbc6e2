"""Programs that use one client library each, unmodified, against a live server.

Each takes the server's URL, completes a small tool loop, and fails with an assertion. They run
in the environment that `scripts/clients` makes, so that their packages are not the project's.
"""
