"""`stillframe inspect FILE`: the contents of a checkpoint, without loading it or running its code.

Exit status:

    0   the file's structure is whole
    1   it is damaged; as much as possible is shown
    2   it is missing, may not be read, or is no checkpoint
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from stillframe import _core
from stillframe._base import file_kinds, records, safetensors
from stillframe._base.bar import folded, printable
from stillframe._base.calls import no_garbage_collection
from stillframe._base.disk import Disk
from stillframe._base.sizes import decimal
from stillframe._check import pickles
from stillframe._remote import disk as disks
from stillframe._shell import contents
from stillframe._shell.contents import NonTensorValue, Tensor
from stillframe.errors import StillframeError

GOOD, DAMAGED, UNUSABLE = 0, 1, 2  # exit statuses
_HEADER_NBYTES = 30  # the length of a zip record's header before its name
_INDENT = "  "
_DEEPEST = 24  # the most levels of a tree; deeper tensors have the rest of the path in their name
_WIDEST = 200  # the most characters of a column
_COLUMNS = ("tensor", "shape", "dtype", "device", "bytes", "kind")


@dataclass(slots=True)
class CheckpointFacts:
    """The facts about a file."""

    path: str
    status: int = GOOD  # the exit status
    error: str | None = None  # what is wrong, as a sentence about the file
    nbytes: int = 0
    format: str = "unknown"
    tensors: list[Tensor] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # how many other values of each type
    metadata: dict[str, str] = field(default_factory=dict)  # from the header of safetensors

    def totals(self, depth: int = 1) -> dict[str, int]:
        """Return the bytes of the storages under each prefix of the tensors' paths. A storage
        counts once under each prefix. The prefix "" has all storages.

        Args:
            depth: The most parts of a prefix.
        """
        # prefix -> storage -> bytes of the storage
        storages_under: dict[str, dict[str, int]] = {"": {}}
        for each in self.tensors:
            parts = each.path.split(".", depth)[:depth]
            for nr_parts in range(len(parts) + 1):
                storages = storages_under.setdefault(".".join(parts[:nr_parts]), {})
                storages[each.storage] = each.storage_nbytes
        return {prefix: sum(storages.values()) for prefix, storages in storages_under.items()}

    def prefixes(self) -> list[str]:
        """Return the first parts of the tensors' paths, in their order."""
        return list(dict.fromkeys(each.path.partition(".")[0] for each in self.tensors))

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        totals = self.totals()
        return {
            "path": self.path,
            "error": self.error,
            "nbytes": self.nbytes,
            "format": self.format,
            "tensors": [each._asdict() for each in self.tensors],
            "totals": {prefix: totals[prefix] for prefix in self.prefixes()},
            "others": dict(self.others),
            "metadata": self.metadata,
        }


def examine(path: str) -> CheckpointFacts:
    """Read one file, or the object of a URL. Errors are in the result."""
    facts = CheckpointFacts(path)
    try:
        disk, facts.path = disks.resolve_disk_and_path(path)
        with disk:
            _fill_facts(disk, facts)
    except (OSError, ValueError, StillframeError) as error:
        reason = getattr(error, "strerror", None) or str(error)  # OSErrors have `strerror`
        facts.status, facts.error = UNUSABLE, reason
    return facts


def _fill_facts(disk: Disk, facts: CheckpointFacts) -> None:
    """Fill `facts` with the facts about its path."""
    path = facts.path
    if disk.is_directory(path):
        facts.status, facts.error = UNUSABLE, f"it is {file_kinds.describe_directory(path, disk)}"
        return
    with disk.open(path, peek=True) as opened, no_garbage_collection():
        fd = opened.fileno()
        try:
            if path.endswith(safetensors.INDEX_SUFFIX) or file_kinds.is_safetensors(fd, path):
                _read_safetensors(fd, disk, facts)
                return
            # In a store check only the archive's directory: headers would be fetched one by one.
            checked = _core.check(fd, False, directory=disk.is_remote)
            facts.nbytes, facts.format = checked["nbytes"], checked["format"]
            reason = None if checked["ok"] else file_kinds.why_not_a_checkpoint(fd, path, checked)
            if reason is not None:
                facts.status, facts.error = UNUSABLE, reason
                return
            if not checked["ok"]:
                facts.status, facts.error = DAMAGED, checked["error"]
            with pickles.reading(fd) as file:
                _read(fd, file, facts)
            if facts.status == GOOD and facts.format == "archive":
                lacking = pickles.lacking(fd, contents.bounded)
                if lacking:
                    name, reason = lacking[0]
                    facts.status, facts.error = DAMAGED, f"record {name}: {reason}"
        except MemoryError:
            facts.status, facts.error = UNUSABLE, "not enough memory to read its pickle"
        except (OSError, pickle.UnpicklingError, safetensors.Damaged) as error:
            facts.status = DAMAGED
            facts.error = f"{facts.error}; {error}" if facts.error else str(error)


def _read_safetensors(fd: int, disk: Disk, facts: CheckpointFacts) -> None:
    """Read the headers of a file, or of the files that an index names."""
    facts.format = "safetensors"
    if not facts.path.endswith(safetensors.INDEX_SUFFIX):
        headers = [safetensors.read_header(fd)]
    else:
        headers = []
        for name in safetensors.read_index(disk, facts.path):
            with disk.open(os.path.join(os.path.dirname(facts.path), name), peek=True) as file:
                headers.append(safetensors.read_header(file.fileno()))
    for header in headers:
        facts.nbytes += header.nbytes
        facts.metadata |= header.metadata
        for name, dtype, shape, begin, end in header.entries:
            torch_name = safetensors.DTYPES[dtype][1] or dtype
            size = end - begin
            facts.tensors.append(Tensor(name, "tensor", torch_name, shape, "cpu", size, name, size))


def _read(fd: int, file: IO[bytes], facts: CheckpointFacts) -> None:
    """Read the pickle of an archive or a legacy file, and count its tensors and values."""
    if facts.format == "legacy":
        root = contents.read(file, legacy=True)
    else:
        root = contents.read(_pickle(fd, file, facts))
    try:
        for each in contents.walk(root):
            if isinstance(each, NonTensorValue):
                facts.others[each.kind] += 1
            else:
                facts.tensors.append(each)
    except (RecursionError, ValueError) as error:  # deeply nested keys, numbers of 5000 digits
        raise pickle.UnpicklingError(f"its pickle cannot be shown: {error}") from None


def _pickle(fd: int, file: IO[bytes], facts: CheckpointFacts) -> IO[bytes]:
    """Return an archive's pickle as a file. If it is damaged, say so in `facts`."""
    # If the pickle's CRC is wrong, read it again without a check, to show as much as possible.
    for verify in (True, False):
        core = _core.restore(fd, verify)[1]
        if core is None:  # the core cannot find the records
            break
        try:
            (data,) = records.read(core, ("data.pkl",))
        except records.RestoreFailed as error:
            failure = error.failure
            if failure is not None and failure.code == _core.ECORRUPT:
                _note_damage(facts, failure)
            continue
        finally:
            core.close()
        if not data:  # there is no record data.pkl
            break
        return io.BytesIO(data)
    return _find_pickle_in_foreign_archive(file)


def _note_damage(facts: CheckpointFacts, failure: records.Failure) -> None:
    """Record that data.pkl is damaged. `stillframe verify` checks the other records."""
    if failure.record == "data.pkl" and facts.status == GOOD:
        facts.status, facts.error = DAMAGED, f"record data.pkl: {failure.reason}"


def _find_pickle_in_foreign_archive(file: IO[bytes]) -> IO[bytes]:
    """Return the pickle of an archive that another program packed. Also find a pickle that is the
    first record of an archive without a directory.

    Raises:
        pickle.UnpicklingError: The pickle cannot be found.
    """
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return io.BytesIO(archive.read(name))
    except pickles.UNZIPPABLE:
        pass
    file.seek(0)
    head = file.read(_HEADER_NBYTES)  # a zip record's header, with the lengths of what follows it
    name_len = int.from_bytes(head[26:28], "little")
    extra_len = int.from_bytes(head[28:30], "little")
    if head[:4] != b"PK\3\4" or not file.read(name_len).endswith(b"/data.pkl"):
        raise pickle.UnpicklingError("its pickle cannot be found")
    file.seek(extra_len, os.SEEK_CUR)
    return file


# ---- showing ------------------------------------------------------------------------------


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _print_facts(facts: CheckpointFacts, *, as_tree: bool) -> None:
    """Print the facts, in lines that are no wider than the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    tensors = _tree(facts) if as_tree else _table_lines(facts, width)
    for line in _report_lines(facts, tensors, as_tree):
        if width is None or len(line) <= width:
            print(line)
        else:
            for part in _wrap_line(line, width):
                print(part)


def _report_lines(facts: CheckpointFacts, tensors: Iterator[str], as_tree: bool) -> Iterator[str]:
    if facts.error:
        word = "damaged: " if facts.status == DAMAGED else ""
        yield printable(f"{facts.path}: {word}{facts.error}")
    if facts.tensors:
        yield from tensors
        totals = facts.totals()
        total = f"{len(facts.tensors)} tensors, {decimal(totals[''])} of storages"
        yield f"{total} in a file of {decimal(facts.nbytes)}"
        if not as_tree and len(totals) > 2:  # several prefixes, and "" for all
            for prefix in facts.prefixes():
                yield f"  {printable(prefix)}: {decimal(totals[prefix])}"
    if facts.others:
        others = ", ".join(f"{nr} {printable(kind)}" for kind, nr in facts.others.most_common())
        yield f"other values: {others}"
    if facts.metadata:
        words = ", ".join(f"{key}: {value}" for key, value in facts.metadata.items())
        yield printable(f"metadata: {words}")


def _wrap_line(line: str, width: int) -> Iterator[str]:
    """Break a line after spaces, slashes and dots if possible, and indent the rest."""
    indent = len(line) - len(line.lstrip()) + 4
    for part in folded(line, width, " " * min(indent, width // 2), break_after=" /."):
        yield from (part[at : at + width] for at in range(0, len(part), width))


def _iter_tensor_cells(facts: CheckpointFacts) -> Iterator[list[str]]:
    """Yield the cells of `_COLUMNS` for each tensor."""
    for each in facts.tensors:
        cells = (
            each.path,
            _format_shape(each.shape),
            each.dtype,
            each.device,
            decimal(each.nbytes),
        )
        yield [printable(cell) for cell in (*cells, each.kind)]


def _table_lines(facts: CheckpointFacts, width: int | None) -> Iterator[str]:
    """Yield a line for each tensor, or two if the terminal is too narrow."""
    rows = [[*_COLUMNS], *_iter_tensor_cells(facts)]
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]
    gaps = 2 * (len(widths) - 1)
    if width is not None and sum(widths) + gaps > width:
        for path, *about in rows[1:]:
            yield path
            yield f"    {'  '.join(about)}"
        return
    for row in rows:
        cells = []
        for name, cell, column_width in zip(_COLUMNS, row, widths, strict=True):
            is_number = name == "bytes"
            cells.append(cell.rjust(column_width) if is_number else cell.ljust(column_width))
        yield "  ".join(cells).rstrip()


def _tree(facts: CheckpointFacts) -> Iterator[str]:
    """Yield a line for each prefix and each tensor, indented by its depth."""
    totals = facts.totals(_DEEPEST)
    # The children of each prefix: (text to show, the child's own prefix). A tensor has None in
    # place of a prefix.
    children: dict[str, list[tuple[str, str | None]]] = {"": []}
    for each in facts.tensors:
        *branches, leaf = each.path.split(".", _DEEPEST)
        parent = ""
        for depth, branch in enumerate(branches, 1):
            prefix = ".".join(branches[:depth])
            if prefix not in children:
                children[prefix] = []
                children[parent].append((f"{branch}  {decimal(totals[prefix])}", prefix))
            parent = prefix
        tensor_text = f"{leaf}  {_format_shape(each.shape)} {each.dtype} {each.device}"
        children[parent].append((tensor_text, None))
    yield printable(facts.path)
    # The children that are still to be shown, as (depth, child). The next one is at the end.
    stack = [(1, child) for child in reversed(children[""])]
    while stack:
        depth, (text, prefix_of_child) = stack.pop()
        yield _INDENT * depth + printable(text)
        if prefix_of_child is not None:
            stack += [(depth + 1, child) for child in reversed(children[prefix_of_child])]


def run(options: argparse.Namespace) -> int:
    facts = examine(options.path)
    if options.json:
        print(json.dumps(facts.as_json()))  # on one line: json's encoder with indents is slow
    else:
        _print_facts(facts, as_tree=options.tree)
    return facts.status
