"""`python -m rollstock`, the same as the script `rollstock`."""

import sys

from rollstock.cli import main

if __name__ == "__main__":
    sys.exit(main())
