"""`python -m headwater.bench NAME …`: a benchmark without the libraries of the server."""

import sys

from headwater.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
