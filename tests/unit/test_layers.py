"""The layers: no circle of files, and no folder that calls, includes or imports upwards.

The calls are those of the compiled objects, as the linker sees them. Includes and imports are those
of the sources, also imports for types and inside functions. ARCHITECTURE.md shows the same list.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE, BINDING, PACKAGE = ROOT / "csrc/core", ROOT / "csrc/python", ROOT / "python/stillframe"

# A folder may call and include itself and the folders before it in its list.
CORE_LAYERS = [
    *("sfr", "base", "trace", "cuda", "memory", "archive", "file", "reader", "check", "commit"),
    *("device", "engine", "stage", "restore", "save", "snapshot", "offload"),
]
# The same for packages. A module outside all of them is a layer of its own.
PACKAGE_LAYERS = [
    *("errors", "_base", "_remote", "_tree", "_watch", "_save", "_load"),
    *("_snapshot", "_dcp", "_check", "_offload", "_preemption", "_lightning", "_huggingface"),
    *(
        "lightning",
        "pytorch_lightning",
        "dcp",
        "offload",
        "__init__",
        "transformers",
        "accelerate",
        "testing",
        "_shell",
        "__main__",
    ),
]

Graph = dict[str, set[str]]


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one node, found by Tarjan's
    algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in list(graph):
        if node not in index:
            visit(node)
    return found


def upwards(graph: Graph, layers: list[str]) -> list[str]:
    """Return the edges from a layer to one above it; a file's layer is the first part of its
    name."""
    rank = {name: rank for rank, name in enumerate(layers)}
    return [
        f"{source} -> {target}"
        for source, targets in sorted(graph.items())
        for target in sorted(targets)
        if rank[source.split("/")[0]] < rank[target.split("/")[0]]
    ]


@functools.cache
def symbols() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return which file of the core has each visible symbol, and which file needs which symbol."""
    sources = [source.relative_to(CORE) for source in CORE.rglob("*.c")]

    def is_older(built: Path, source: Path) -> bool:
        return built.stat().st_mtime < (CORE / source).stat().st_mtime

    def objects(variant: str) -> list[Path]:
        built = ROOT / "build" / variant / "core"
        found = [(built / source).with_suffix(".o") for source in sources]
        whole = all(each.exists() for each in found)
        return found if whole and not any(map(is_older, found, sources)) else []

    compiled = [each for each in map(objects, ("asan", "plain", "tsan")) if each]
    if not compiled:
        pytest.skip("the C tests are not built, or are older than the sources (make asan)")
    newest = max(compiled, key=lambda each: max(file.stat().st_mtime for file in each))
    listing = subprocess.run(
        ["nm", "-P", "-A", *map(str, newest)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    defined_in: dict[str, str] = {}
    needs: list[tuple[str, str]] = []
    for line in listing.splitlines():
        file, symbol, kind = line.split()[:3]
        name = file.rstrip(":").rpartition("/core/")[2].removesuffix(".o") + ".c"
        if not symbol.startswith("sfr"):
            continue
        if kind == "U":
            needs.append((name, symbol))
        elif kind.isupper():
            defined_in[symbol] = name
    return defined_in, needs


def calls() -> Graph:
    """Return which file of the core calls which, by the symbols of its objects."""
    defined_in, needs = symbols()
    graph: Graph = {}
    for name, symbol in needs:
        if defined_in.get(symbol, name) != name:
            graph.setdefault(name, set()).add(defined_in[symbol])
    return graph


def words(*files: Path) -> set[str]:
    """Return the words of source files outside their comments."""
    text = "\n".join(file.read_text() for file in files)
    return set(re.findall(r"\bsfr\w+", re.sub(r"/\*.*?\*/", "", text, flags=re.S)))


def includes(top: Path, *paths: Path) -> Graph:
    """Return which file under `top` includes which."""
    graph: Graph = {}
    for file in top.rglob("*.[ch]"):
        for name in re.findall(r'(?m)^#include "([^"]+)"', file.read_text()):
            found = next(each / name for each in (file.parent, *paths) if (each / name).exists())
            if found.is_relative_to(top):
                graph.setdefault(file.relative_to(top).as_posix(), set()).add(
                    found.relative_to(top).as_posix()
                )
    return graph


def imports(top: Path, *package: str) -> Graph:
    """Return which module under `top` imports which."""
    names = {
        ".".join((*package, *file.relative_to(top).with_suffix("").parts)): file
        for file in top.rglob("*.py")
    }
    names |= {
        name.removesuffix(".__init__"): file
        for name, file in list(names.items())
        if name.endswith(".__init__")
    }

    def targets(node: ast.AST) -> Iterable[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                # The binary modules are below everything, and are not files of the package.
                if name not in names and alias.name == "_core":
                    continue
                yield name if name in names else node.module

    graph: Graph = {}
    for file in top.rglob("*.py"):
        source = file.relative_to(top).with_suffix("").as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            for target in targets(node):
                other = names.get(target)
                if other is not None and other != file:
                    graph.setdefault(source, set()).add(
                        other.relative_to(top).with_suffix("").as_posix()
                    )
    return graph


def test_the_core_has_no_circle_of_files_and_calls_only_earlier_folders():
    graph = calls()
    assert circles(graph) == []
    assert upwards(graph, CORE_LAYERS) == []


def test_function_used_in_one_file_is_static():
    defined_in, needs = symbols()
    others = (CORE / "sfr", BINDING, ROOT / "tests")
    needed = {symbol for _, symbol in needs}
    needed |= words(*(file for folder in others for file in folder.rglob("*.[ch]")))
    assert {
        f"{file}: {symbol}" for symbol, file in defined_in.items() if symbol not in needed
    } == set()
    files = [words(file) for file in BINDING.rglob("*.c")]
    declared = re.compile(r"(?m)^\w[^;{}()]*?\b(sfr_py_\w+)\([^;{}]*\);")
    lone = {
        name
        for header in BINDING.rglob("*.h")
        for name in declared.findall(header.read_text())
        if sum(name in each for each in files) < 2
    }
    assert lone == set()


def test_files_include_only_their_own_and_earlier_folders():
    graph = includes(CORE, CORE)
    assert circles(graph) == []
    assert {target.split("/")[0] for target in graph.pop("sfr.h")} == {"sfr"}
    assert upwards(graph, CORE_LAYERS) == []  # no file includes all of sfr.h
    assert circles(includes(BINDING, BINDING, CORE, BINDING.parent)) == []


def test_modules_import_only_their_own_and_earlier_packages():
    graph = imports(PACKAGE, "stillframe")
    assert circles(graph) == []
    assert upwards(graph, PACKAGE_LAYERS) == []
    assert circles(imports(ROOT / "benchmarks")) == []


def test_only_commands_bound_the_whole_process():
    """A limit set for the reader of a pickle would also stop a training's own allocations."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")]
    found = {file for file in files if re.search(r"\b(setrlimit|prlimit)\b", file.read_text())}
    assert {file.relative_to(PACKAGE).parts[0] for file in found} == {"_shell"}


def test_the_architecture_page_shows_these_layers():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    shown = re.findall(r"(?m)^\| `(\w+)` \|", page)
    assert [name for name in shown if name in CORE_LAYERS] == CORE_LAYERS
    packages = [name for name in PACKAGE_LAYERS if name.startswith("_") and "__" not in name]
    assert [name for name in shown if name in packages] == packages


def test_every_folder_is_in_the_list():
    assert {each.name for each in CORE.iterdir() if each.is_dir()} == set(CORE_LAYERS)
    folders = {each.name for each in PACKAGE.iterdir() if each.is_dir()} - {"__pycache__"}
    assert folders <= set(PACKAGE_LAYERS)


def test_no_two_modules_of_the_tests_share_a_name():
    """They are imported by name alone, so the first one found would be used everywhere."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_scripts_use_only_names_that_the_modules_beside_them_define():
    """No type check covers the benchmarks and the demo, so it would not notice a wrong name."""
    missing = []
    for folder in (ROOT / "benchmarks", ROOT / "examples" / "demo"):
        trees = {file.stem: ast.parse(file.read_text()) for file in folder.glob("*.py")}
        defined = {name: top_level_names(tree) for name, tree in trees.items()}
        for script, tree in trees.items():
            nodes = [*ast.walk(tree)]
            named = {
                alias.name
                for node in nodes
                if isinstance(node, ast.Import)
                for alias in node.names
                if alias.name in trees and alias.asname is None
            }
            used = [
                (node.module, alias.name)
                for node in nodes
                if isinstance(node, ast.ImportFrom) and node.module in trees
                for alias in node.names
            ]
            used += [
                (node.value.id, node.attr)
                for node in nodes
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in named
            ]
            missing += [f"{script}: {m}.{name}" for m, name in used if name not in defined[m]]
    assert missing == []


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found


def test_the_checker_finds_circles_and_calls_of_later_folders():
    graph = {"base/a": {"file/b"}, "file/b": {"file/c"}, "file/c": {"file/b", "base/a"}}
    assert circles(graph) == [["base/a", "file/b", "file/c"]]
    assert upwards(graph, CORE_LAYERS) == ["base/a -> file/b"]
    assert sys.getrecursionlimit() > len(list(CORE.rglob("*.c")))
