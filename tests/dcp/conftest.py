from fix_dcp import one_rank, quiet

__all__ = ["one_rank", "quiet"]
