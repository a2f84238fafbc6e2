"""Decides what runs next. Pure: no I/O, no threads, no clock, no torch."""
