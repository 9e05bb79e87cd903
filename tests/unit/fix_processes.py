"""Runs Python programs in separate processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; return its status and its output.

    `options` are those of subprocess.run. A failure raises an error only with check=True.
    """
    given = {"capture_output": True, "text": True, "check": False, "timeout": 240, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], **given)
