"""The runner of mistakes and the choice of changed lines, over a tree of two files."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import changed
import mistakes
import pytest
from tree import TreeCopy

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
C_FILE, PYTHON_FILE = "csrc/core/half.c", "python/double.py"
C_TEST, PYTHON_TEST = "test_half", "tests/unit/test_double.py"
MAKEFILE = """
CC ?= cc
build/plain/test_%: tests/c/test_%.c csrc/core/half.c
\t@mkdir -p $(@D) && $(CC) $^ -o $@
"""
TREE = {
    "Makefile": MAKEFILE,
    C_FILE: "int half(int n);\nint half(int n) { int unused = 1; return n / 2; }\n",
    "tests/c/test_half.c": "int half(int n);\nint main(void) { return half(6) != 3; }\n",
    PYTHON_FILE: "def double(n):\n    return 2 * n  # twice\n",
    PYTHON_TEST: "from double import double\n\ndef test_it():\n    assert double(3) == 6\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "entries").mkdir()
    return tmp_path


def entry(file: str, old: str, new: str, test: str, **more: str) -> str:
    fields = {"old": old, "new": new, "loses": "the sum", **more}
    lines = "\n".join(f"{key} = '''{value}'''" for key, value in fields.items())
    return f'[["{file}"]]\n{lines}\ntests = ["{test}"]\n'


KILLED = entry(C_FILE, "n / 2", "n / 3", C_TEST)
LIVED = entry(C_FILE, "unused = 1", "unused = 2", C_TEST)
KILLED_IN_PYTHON = entry(PYTHON_FILE, "2 * n", "3 * n", PYTHON_TEST)
GONE = entry(C_FILE, "n % 2", "n % 3", C_TEST)


def run(tree: Path, capsys: pytest.CaptureFixture[str], *entries: str) -> tuple[int, list[str]]:
    """Return the exit status, and each outcome in the list's order."""
    (tree / "entries/all.toml").write_text("\n".join(entries))
    status = mistakes.main(["--root", str(tree), "--entries", str(tree / "entries")])
    return status, re.findall(r"^\d+/\d+ (\w+)", capsys.readouterr().out, re.MULTILINE)


def test_mistake_is_killed_if_a_test_fails_and_lives_otherwise(tree, capsys):
    assert run(tree, capsys, KILLED) == (0, ["killed"])
    assert run(tree, capsys, LIVED, KILLED, KILLED_IN_PYTHON) == (1, ["lived", "killed", "killed"])


def test_tree_is_unchanged_and_mistakes_do_not_accumulate(tree, capsys):
    harmless = entry(C_FILE, "int unused = 1;", "", C_TEST)
    assert run(tree, capsys, KILLED, harmless) == (1, ["killed", "lived"])
    assert {name: (tree / name).read_text() for name in TREE} == TREE


def test_killed_run_leaves_no_mistake_in_the_copy(tree, capsys):
    run(tree, capsys, KILLED)
    left = tree / "build/mutants/mistakes" / C_FILE
    left.write_text(TREE[C_FILE].replace("n / 2", "7"))
    subprocess.run(["make", "-s", "build/plain/test_half"], cwd=left.parents[2], check=True)
    # with 7 in place of a half, the test of that mistake fails
    assert run(tree, capsys, LIVED) == (1, ["lived"])


def test_an_entry_that_no_longer_applies_is_a_warning(tree, capsys):
    twice = entry(C_FILE, "half(int n)", "half(long n)", C_TEST)
    no_file = entry("csrc/core/third.c", "n", "m", C_TEST)
    broken = entry(C_FILE, "return n / 2", "return n /", C_TEST)
    broken_python = entry(PYTHON_FILE, "2 * n", "2 *", PYTHON_TEST)
    no_test = entry(C_FILE, "n / 2", "n / 4", "test_none")
    assert run(tree, capsys, GONE, twice, broken, no_test) == (0, ["gone"] * 4)
    assert run(tree, capsys, no_file, broken_python, KILLED) == (0, ["gone", "gone", "killed"])


def test_a_test_that_fails_without_the_mistake_kills_nothing(tree, capsys):
    (tree / "tests/c/test_half.c").write_text("int main(void) { return 1; }\n")
    assert run(tree, capsys, KILLED) == (0, ["gone"])


def test_a_mistake_that_makes_a_test_hang_is_killed(tree, capsys, monkeypatch):
    monkeypatch.setattr("tree.C_TIMEOUT_S", 1.0)
    assert run(tree, capsys, entry(C_FILE, "return n / 2;", "for (;;) ;", C_TEST))[1] == ["killed"]


@pytest.mark.parametrize(
    "text",
    [
        entry(C_FILE, "n / 2", "n / 2", C_TEST),
        entry(C_FILE, "n / 2", "n / 3", C_TEST, loses=""),
        entry(C_FILE, "n / 2", "n / 3", C_TEST, lost="x"),
        KILLED + KILLED,
        "\n".join(entry(C_FILE, "n / 2", f"n / {n}", C_TEST) for n in range(3, 154)),
    ],
)
def test_list_with_an_invalid_entry_is_refused(tree, text):
    (tree / "entries/all.toml").write_text(text)
    with pytest.raises(mistakes.ListError):
        mistakes.load(tree / "entries")


def test_a_sample_differs_from_day_to_day(capsys):
    def sample(day: str) -> list[str]:
        assert mistakes.main(["--list", "--sample", "5", "--day", day]) == 0
        return capsys.readouterr().out.splitlines()

    assert len(sample("2026-11-22")) == 5
    assert sample("2026-11-22") == sample("2026-11-22") != sample("2026-11-23")


def test_every_mistake_applies_and_is_valid():
    for mistake in mistakes.load(HERE / "mistakes"):
        text = mistake.apply((ROOT / mistake.file).read_text())
        if mistake.file.endswith(".py"):
            ast.parse(text)


# ---- changed lines ---------------------------------------------------------------------------


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


def test_changed_and_new_lines_are_mutated(tree):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "first")
    assert changed.Changes(tree, "HEAD").lines() == {}
    (tree / C_FILE).write_text(TREE[C_FILE].replace("n / 2", "n >> 1") + "\nint more;\n")
    (tree / "python/new.py").write_text("a = 1\nb = 2\n")
    (tree / "tests/unit/test_double.py").write_text("")
    expected = {C_FILE: {2, 3, 4}, "python/new.py": {1, 2}}
    assert changed.Changes(tree, "HEAD").lines() == expected


def test_a_folder_of_tests_is_run_by_pytest(tree):
    copy = TreeCopy(tree, tree / "build/copy")
    assert copy.command(["tests/unit/base"])[1:3] == ["-m", "pytest"]
    assert copy.command(["still/test_half"]) == ["./build/still/test_half"]


def test_every_file_of_the_package_has_tests_for_its_mutants():
    files = [*ROOT.glob("csrc/**/*.c"), *ROOT.glob("python/stillframe/**/*.py")]
    for path in files:
        for test in changed.tests_of(str(path.relative_to(ROOT))):
            there = (ROOT / test).exists() if "/" in test else [*ROOT.glob(f"tests/c/*/{test}.c")]
            assert there, f"{path}: there is no test {test}"


def test_processes_of_tests_import_the_copy_with_the_mistake():
    """A PYTHONPATH of its own leads to the installed tree, in which every mistake lives."""
    for path in HERE.parent.rglob("*.py"):
        if path.parent != HERE:
            for value in re.findall('"PYTHONPATH": (.*)', path.read_text()):
                assert "sys.path" in value or "join(paths)" in value, f"{path.name}: {value}"
