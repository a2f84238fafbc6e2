"""Programs that use one client library each, unmodified, against a live server.

Each takes the server's URL, completes a small tool loop, and fails with an assertion. They run
in the environment of `scripts/clients`, so that the project does not depend on their packages.
"""
