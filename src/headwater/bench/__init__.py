"""Every figure in the documentation, reproduced by `headwater bench NAME`.

A benchmark is a module here with a `main(argv)`; modules that begin with `_` are shared parts.
Each has `--quick` (ends within 40 s) and `--json` (one object on standard output).
"""
