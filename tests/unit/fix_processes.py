"""Python programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; return its status and what it printed.

    `options` are those of subprocess.run. A failure raises nothing, unless check=True asks for it.
    """
    given = {"capture_output": True, "text": True, "check": False, "timeout": 240, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], **given)
