"""`python -m stillframe`, and the command `stillframe`."""

import sys

from stillframe._shell.cli import main

if __name__ == "__main__":
    sys.exit(main())
