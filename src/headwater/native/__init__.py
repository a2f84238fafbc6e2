"""C code that is compiled on the user's machine, and what it needs; imports no torch."""
