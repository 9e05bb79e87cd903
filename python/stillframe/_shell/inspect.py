"""`stillframe inspect FILE`: what is in a checkpoint, without loading it and without obeying it.

Exit status: 0 the file's structure is whole; 1 it is damaged (what can be shown, is); 2 it is
missing, may not be read, or is no checkpoint.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import IO, Any

from stillframe import _core
from stillframe._base import looks
from stillframe._tree import contents
from stillframe._tree.contents import Tensor, Value

GOOD, DAMAGED, UNUSABLE = 0, 1, 2
_LOCAL = 30  # bytes of a record's header before its name
_MOST_FOLDED = 1000  # rows of a table; folding them to the terminal takes 0.5 ms each
_COLUMNS = ("tensor", "shape", "dtype", "device", "bytes", "kind")


@dataclass(slots=True)
class Found:
    """What is known of a file."""

    path: str
    status: int = GOOD
    error: str | None = None
    nbytes: int = 0
    format: str = "unknown"
    tensors: list[Tensor] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    def totals(self) -> dict[str, int]:
        """Bytes of the storages under each prefix of a tensor's path, ``""`` for all; each storage
        counts once."""
        under: dict[str, dict[str, int]] = {"": {}}
        for each in self.tensors:
            parts = each.path.split(".")
            for depth in range(len(parts) + 1):
                storages = under.setdefault(".".join(parts[:depth]), {})
                storages[each.storage] = each.storage_nbytes
        return {prefix: sum(storages.values()) for prefix, storages in under.items()}

    def prefixes(self) -> list[str]:
        """The first parts of the tensors' paths, in their order."""
        return list(dict.fromkeys(each.path.partition(".")[0] for each in self.tensors))

    def as_json(self) -> dict[str, Any]:
        totals = self.totals()
        names = [each.name for each in fields(Tensor)]
        return {
            "path": self.path,
            "error": self.error,
            "nbytes": self.nbytes,
            "format": self.format,
            "tensors": [{name: getattr(each, name) for name in names} for each in self.tensors],
            "totals": {prefix: totals[prefix] for prefix in self.prefixes()},
            "others": dict(self.others),
        }


def look(path: str) -> Found:
    """Looks into one file. Raises nothing of the file's."""
    found = Found(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        found.status, found.error = UNUSABLE, getattr(error, "strerror", None) or str(error)
        return found
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        found.status, found.error = UNUSABLE, f"it is {looks.directory(path)}"
        return found
    with os.fdopen(fd, "rb") as file:
        try:
            checked = _core.check(fd, False)
            found.nbytes, found.format = checked["nbytes"], checked["format"]
            strange = None if checked["ok"] else looks.no_checkpoint(fd, path, checked)
            if strange is not None:
                found.status, found.error = UNUSABLE, strange
                return found
            if not checked["ok"]:
                found.status, found.error = DAMAGED, checked["error"]
            _read(file, found)
        except (OSError, pickle.UnpicklingError) as error:
            found.status = DAMAGED
            found.error = f"{found.error}; {error}" if found.error else str(error)
    return found


def _read(file: IO[bytes], found: Found) -> None:
    for each in contents.walk(
        contents.read(_pickle(file, found.format), legacy=found.format == "legacy")
    ):
        if isinstance(each, Value):
            found.others[each.kind] += 1
        else:
            found.tensors.append(each)


def _pickle(file: IO[bytes], kind: str) -> IO[bytes]:
    """Where the pickle begins; of an archive whose directory is lost, its first record is it."""
    file.seek(0)
    if kind == "legacy":
        return file
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return io.BytesIO(archive.read(name))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError):
        pass
    file.seek(0)
    head = file.read(_LOCAL)
    name_len, extra_len = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    if head[:4] != b"PK\3\4" or not file.read(name_len).endswith(b"/data.pkl"):
        raise pickle.UnpicklingError("its pickle cannot be found")
    file.seek(extra_len, os.SEEK_CUR)
    return file


# ---- showing ------------------------------------------------------------------------------


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _show(found: Found, *, as_tree: bool) -> None:
    from rich.filesize import decimal

    from stillframe._shell.console import Console

    console = Console()
    folds = console.is_terminal and len(found.tensors) <= _MOST_FOLDED
    if not console.is_terminal:  # a file or a pipe has no width
        paths = [found.path, found.error or "", *(each.path for each in found.tensors)]
        console = Console(width=100 + 2 * max(map(len, paths)))
    if found.error:
        word = "damaged: " if found.status == DAMAGED else ""
        console.print(_printable(f"{found.path}: {word}{found.error}"), markup=False)
    if found.tensors:
        if as_tree or folds:
            console.print(_tree(found) if as_tree else _table(found))
        else:
            for line in _lines(found):
                print(line)
        totals = found.totals()
        total = f"{len(found.tensors)} tensors, {decimal(totals[''])} of storages"
        console.print(f"{total} in a file of {decimal(found.nbytes)}", highlight=False)
        for prefix in found.prefixes() if not as_tree and len(found.prefixes()) > 1 else []:
            nbytes = decimal(totals[prefix])
            console.print(f"  {_printable(prefix)}: {nbytes}", markup=False, highlight=False)
    if found.others:
        others = ", ".join(f"{nr} {_printable(kind)}" for kind, nr in found.others.most_common())
        console.print(f"other values: {others}", markup=False, highlight=False)


def _rows(found: Found) -> Iterator[list[str]]:
    from rich.filesize import decimal

    for each in found.tensors:
        cells = (each.path, _shape(each.shape), each.dtype, each.device, decimal(each.nbytes))
        yield [_printable(cell) for cell in (*cells, each.kind)]


def _lines(found: Found) -> Iterator[str]:
    """The table as wide as it is."""
    rows = [[*_COLUMNS], *_rows(found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    row_format = "  ".join(
        f"{{:{'>' if name == 'bytes' else ''}{width}}}"
        for name, width in zip(_COLUMNS, widths, strict=True)
    )
    for row in rows:
        yield row_format.format(*row).rstrip()


def _table(found: Found) -> Any:
    """Folded to the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for row in _rows(found):
        table.add_row(*map(Text, row))
    return table


def _tree(found: Found) -> Any:
    from rich.filesize import decimal
    from rich.text import Text
    from rich.tree import Tree

    top = Tree(Text(_printable(found.path)))
    branches: dict[str, Any] = {"": top}
    totals = found.totals()
    for each in found.tensors:
        parts = each.path.split(".")
        for depth in range(1, len(parts)):
            prefix = ".".join(parts[:depth])
            if prefix not in branches:
                words = f"{parts[depth - 1]}  {decimal(totals[prefix])}"
                parent = branches[".".join(parts[: depth - 1])]
                branches[prefix] = parent.add(Text(_printable(words)))
        words = f"{parts[-1]}  {_shape(each.shape)} {each.dtype} {each.device}"
        branches[".".join(parts[:-1])].add(Text(_printable(words)))
    return top


def run(options: argparse.Namespace) -> int:
    """The command."""
    found = look(options.path)
    if options.json:
        print(json.dumps(found.as_json()))  # one line: the quick encoder knows no other
    else:
        _show(found, as_tree=options.tree)
    return found.status
