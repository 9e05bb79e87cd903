"""Trees of Python objects: their pickle, their storages, and how they are made again."""
