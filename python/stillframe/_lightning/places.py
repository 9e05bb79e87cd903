"""Names of files, as Lightning gives them: local ones, and those of fsspec."""

from __future__ import annotations

import os
import re
from typing import Any

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(path: Any) -> bool:
    return _REMOTE.match(os.fsdecode(path)) is not None


def absolute(path: Any) -> str:
    """The one name of a path: absolute where it is a local one."""
    text = os.fsdecode(path)
    return text if is_remote(text) else os.path.abspath(text)
