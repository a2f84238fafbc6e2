"""Splits model output into reasoning, content and tool calls.

It is pure. A parser reads a stream in pieces of any size; the division into pieces never
changes the result. Text that looks like a call but is not one becomes content and is counted as
malformed. A parser never raises an error for the text of a model.
"""
