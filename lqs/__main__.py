"""`python -m lqs`: the same as `lqs`."""

import sys

from lqs.cli import main

if __name__ == "__main__":
    sys.exit(main())
