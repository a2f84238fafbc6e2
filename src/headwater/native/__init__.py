"""C code that is compiled on the user's machine, and its compiler. Imports no torch."""
