"""Fixtures of the tests of object stores."""

from fix_buckets import bucket, memory
from fix_store import s3_server, server, small_parts

__all__ = ["bucket", "memory", "s3_server", "server", "small_parts"]
