"""`python -m stillframe`: the command `stillframe`, by the Python that is to run it."""

import sys

from _stillframe_command import main

if __name__ == "__main__":
    sys.exit(main())
