"""A cluster of processes from one file: what runs, where, and what happens when one dies.

`spec` is the file, `processes` turns it into command lines, `supervisor` keeps them running on any
`host` (this machine, or nodes of a Ray cluster), and `control` lets other commands talk to it.
"""
