"""Fixtures of the tests of object stores."""

from fix_store import s3_server, server, small_parts

__all__ = ["s3_server", "server", "small_parts"]
