"""`python -m rollstock`: the command line, for where the script `rollstock` is not on the path."""

import sys

from rollstock.cli import main

if __name__ == "__main__":
    sys.exit(main())
