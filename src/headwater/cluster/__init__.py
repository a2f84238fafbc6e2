"""A cluster of processes, described by one file.

`spec` reads the file, `processes` turns it into command lines, `supervisor` keeps the processes
running on any `host` (this machine, or nodes of a Ray cluster), and `control` lets other
commands talk to the supervisor.
"""
