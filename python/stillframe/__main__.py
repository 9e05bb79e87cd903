"""`python -m stillframe`: the command `stillframe`, run by this Python."""

import sys

from _stillframe_command import main

if __name__ == "__main__":
    sys.exit(main())
