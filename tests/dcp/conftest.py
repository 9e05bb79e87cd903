from fix_dcp import one_rank, quiet
from fix_store import s3_server, server, small_parts

__all__ = ["one_rank", "quiet", "s3_server", "server", "small_parts"]
