"""`stillframe latest DIR`: print the path of the newest whole checkpoint.

Exit status: 0 it is printed; 2 there is none, or DIR cannot be read. Newer checkpoints that are not
whole are named on stderr.
"""

from __future__ import annotations

import argparse
import logging
import sys

from stillframe._base import urls
from stillframe._base.bar import printable
from stillframe._check import newest
from stillframe._check.files import UNUSABLE, reason_of
from stillframe._remote import disk as disks
from stillframe._shell import contents
from stillframe.errors import StillframeError


class _StderrHandler(logging.Handler):
    """A log handler that prints each message to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0, or UNUSABLE (2) if no path is printed."""
    lines, logger = _StderrHandler(), logging.getLogger("stillframe")
    directory = urls.shown(options.directory)
    logger.addHandler(lines)
    try:
        thorough = options.check == "bytes"
        disk, directory = disks.resolve_disk_and_path(options.directory)
        with disk:
            newest_path = newest.find(
                directory, thorough=thorough, bound=contents.bounded, disk=disk
            )
    except (OSError, ValueError, StillframeError) as error:
        reason = reason_of(error).replace("no such file", "no such directory")
        print(f"{printable(directory)}: {reason}", file=sys.stderr)
        return UNUSABLE
    finally:
        logger.removeHandler(lines)
    if newest_path is None:
        print(f"{printable(directory)}: no whole checkpoint is in it", file=sys.stderr)
        return UNUSABLE
    print(newest_path)
    return 0
