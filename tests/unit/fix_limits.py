"""Lowered size thresholds, with which states of kilobytes take the paths of gigabytes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from stillframe import _core
from stillframe._load import fill, restore
from stillframe._remote import file as remote_file

KIB = 1 << 10
PAGE = 4 * KIB

# Of _core: zip64 from 12 KiB or 5 records on; chunks of one page; threads for every check.
CORE = {
    "zip64_bytes": 12 * KIB,
    "zip64_records": 5,
    "reader_chunk_bytes": PAGE,
    "check_chunk_bytes": PAGE,
    "ahead_bytes": 1,
}
# Of modules. A load allocates memory ahead in the same proportions as without limits.
MODULES = [
    (restore, "_AHEAD_BYTES", 8 * KIB),
    (restore, "_DEVICE_AHEAD_BYTES", 2 * KIB),
    (restore, "_BATCH_BYTES", 1 * KIB),
    (fill, "_AHEAD_BYTES", 1 * KIB),
    (remote_file, "CHUNK_BYTES", PAGE),
    (remote_file, "PEEK_BYTES", PAGE),
]


@contextmanager
def lowered() -> Iterator[None]:
    """Lower every threshold. No save, check or load may be under way at either end."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in MODULES:
            patch.setattr(module, name, value)
        _core._set_limits(**CORE)
        try:
            yield
        finally:
            _core._set_limits()
