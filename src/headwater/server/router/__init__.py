"""The router: a front door for many instances, in a process of its own."""
