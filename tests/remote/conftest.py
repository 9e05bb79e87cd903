"""Fixtures of the tests of object stores."""

import fsspec
import pytest
from fix_buckets import bucket, memory
from fix_mirror import store
from fix_store import s3_server, server, small_parts

__all__ = ["bucket", "memory", "memory_files", "s3_server", "server", "small_parts", "store"]


@pytest.fixture
def memory_files():
    """Return fsspec's file system in memory, empty before and after the test."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()
