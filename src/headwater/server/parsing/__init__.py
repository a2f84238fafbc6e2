"""Model output to structured parts: reasoning, content and tool calls.

Pure: text in, values out. A parser reads a stream in pieces of any size; how the stream is
split never changes what comes out. Text that looks like a call and is not one becomes content
and is counted as malformed; a parser never raises for what a model wrote.
"""
