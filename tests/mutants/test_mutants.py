"""The runner of the mutants, over a tree of one C function and one Python module.

And the list of this tree: each edit of it applies, so that the list follows the code.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kept
import mutant_list
import mutants
import pytest

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
    (tmp_path / "edits").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def little_is_imported_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants.ground, "TORCH", ("pytest",))


def entry(file: str, old: str, new: str, test: str, **more: str) -> str:
    fields = {"old": old, "new": new, "loses": "the sum", **more}
    said = "\n".join(f"{key} = '''{value}'''" for key, value in fields.items())
    return f'[["{file}"]]\n{said}\ntests = ["{test}"]\n'


def run(tree: Path, *entries: str, options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """The exit status, and the outcome of each edit in the list's order."""
    (tree / "edits/all.toml").write_text("\n".join(entries))
    listed = mutant_list.load(tree / "edits")
    status = mutants.main(["--root", str(tree), "--edits", str(tree / "edits"), *options])
    results = json.loads((tree / "build/mutants/results.json").read_text())
    return status, [results[each.key]["outcome"] for each in listed if each.key in results]


KILLED = entry(C_FILE, "n / 2", "n / 3", C_TEST)
LIVED = entry(C_FILE, "unused = 1", "unused = 2", C_TEST)
EXPLAINED = entry(C_FILE, "unused = 1", "unused = 3", C_TEST, same="nobody reads it")
GONE = entry(C_FILE, "n % 2", "n % 3", C_TEST)
BROKEN = entry(C_FILE, "return n / 2", "return n /", C_TEST)
KILLED_IN_PYTHON = entry(PYTHON_FILE, "2 * n", "3 * n", PYTHON_TEST)


def test_an_edit_is_killed_when_a_test_fails(tree: Path) -> None:
    assert run(tree, KILLED) == (0, ["killed"])


def test_an_edit_of_python_is_noticed_by_pytest_alone(tree: Path) -> None:
    lived = entry(PYTHON_FILE, "# twice", "# thrice", PYTHON_TEST)
    assert run(tree, KILLED_IN_PYTHON, lived) == (1, ["killed", "lived"])


def test_each_run_of_pytest_imports_the_tree_anew_also_after_one_that_hung(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = entry(PYTHON_FILE, "return", "while True: pass\n    return", PYTHON_TEST)
    lives = entry(PYTHON_FILE, "2 * n", "n + n", PYTHON_TEST)
    listed = (hangs, lives, KILLED_IN_PYTHON)
    # Of the run without an edit and of one with each: a busy machine is slow, and does not hang.
    limits_s = iter((300.0, 1.0, 300.0, 300.0))
    monkeypatch.setattr(mutants.ground, "_limit_s", lambda *_: next(limits_s))
    status, outcomes = run(tree, *listed, options=("-j1",))
    assert (status, outcomes) == (1, ["killed", "lived", "killed"])


def test_what_was_never_tried_comes_before_what_was_killed_once(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tree, KILLED)
    (tree / C_FILE).write_text(TREE[C_FILE] + "\n")
    capsys.readouterr()
    run(tree, KILLED, LIVED, options=("-j1",))
    told = re.findall(r"^(killed|lived) .* left", capsys.readouterr().out, re.MULTILINE)
    assert told == ["lived", "killed"]


def test_an_edit_that_nothing_notices_lived_and_is_told(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tree, LIVED, KILLED) == (1, ["lived", "killed"])
    assert "csrc/core/half.c:2: lived" in capsys.readouterr().out
    score = json.loads((tree / "build/mutants/score.json").read_text())
    assert score == {"of": 2, "lived": 1, "killed": 1, "score": 0.5}


def test_an_edit_with_a_reason_may_live_and_must_not_be_killed(tree: Path) -> None:
    assert run(tree, EXPLAINED) == (0, ["explained"])
    assert run(tree, entry(C_FILE, "n / 2", "n / 4", C_TEST, same="why not")) == (1, ["error"])


def test_an_edit_that_is_known_to_live_counts_and_fails_nothing_until_it_is_killed(
    tree: Path,
) -> None:
    known = entry(C_FILE, "unused = 1", "unused = 4", C_TEST, open="a test of what nobody reads")
    assert run(tree, known) == (0, ["open"])
    assert json.loads((tree / "build/mutants/score.json").read_text())["score"] == 0
    assert run(tree, entry(C_FILE, "n / 2", "n / 4", C_TEST, open="a test")) == (1, ["error"])


def test_an_edit_that_does_not_apply_or_compile_is_an_error(tree: Path) -> None:
    twice = entry(C_FILE, "half(int n)", "half(long n)", C_TEST)
    nowhere = entry("csrc/core/third.c", "n", "m", C_TEST)
    in_python = entry(PYTHON_FILE, "2 * n", "2 *", PYTHON_TEST)
    assert run(tree, GONE, twice, BROKEN) == (1, ["does not apply"] * 2 + ["does not compile"])
    assert run(tree, nowhere, in_python) == (1, ["does not apply", "does not compile"])


def test_a_test_that_fails_without_the_edit_kills_nothing(tree: Path) -> None:
    (tree / "tests/c/test_half.c").write_text("int main(void) { return 1; }\n")
    missing = entry(C_FILE, "n / 2", "n / 4", "test_none")
    assert run(tree, KILLED, missing) == (1, ["error", "error"])


def test_the_tree_itself_is_left_alone_and_edits_do_not_add_up(tree: Path) -> None:
    both = entry(C_FILE, "n / 2", "n / 3", C_TEST), entry(C_FILE, "int unused = 1;", "", C_TEST)
    assert run(tree, *both) == (1, ["killed", "lived"])
    assert {name: (tree / name).read_text() for name in TREE} == TREE
    assert (tree / "build/mutants/ground0" / C_FILE).read_text() == TREE[C_FILE]


def test_what_was_killed_is_not_run_again_until_its_file_or_test_changes(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tree, KILLED, LIVED)
    for change, known in ((None, "1 are known"), (C_FILE, None), ("tests/c/test_half.c", None)):
        if change is not None:
            (tree / change).write_text((tree / change).read_text() + "\n")
        capsys.readouterr()
        assert run(tree, KILLED, LIVED) == (1, ["killed", "lived"])
        said = capsys.readouterr().out
        assert (known or "2 mutants") in said and ("known" in said) == (known is not None)


def test_an_outcome_is_of_the_files_as_they_were_when_it_was_tried(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mutants.ground.Ground.run

    def while_somebody_writes(*arguments: Any) -> object:
        (tree / C_FILE).write_text(TREE[C_FILE] + "\n")
        return real(*arguments)

    monkeypatch.setattr(mutants.ground.Ground, "run", while_somebody_writes)
    assert run(tree, KILLED) == (0, ["killed"])
    (mutant,) = mutant_list.load(tree / "edits")
    assert kept.Kept(tree).outcome(mutant) == "before"
    (tree / C_FILE).write_text(TREE[C_FILE])
    assert kept.Kept(tree).outcome(mutant) == "killed"


def score(tree: Path, *options: str) -> dict[str, dict[str, int]]:
    """What is published, by folder."""
    options = ("--publish", "--root", str(tree), "--edits", str(tree / "edits"), *options)
    assert mutants.main([*options]) == 0
    assert kept.is_published(tree)
    found: dict[str, dict[str, int]] = json.loads((tree / kept.SCORE).read_text())["folders"]
    return found


def test_a_score_is_of_the_whole_list_and_of_the_tree_as_it_is(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests/mutants").mkdir()
    page = "# Mistakes\n\n<!-- table mutants -->\n<!-- end of table -->\n\nMore.\n"
    (tree / kept.PAGE).write_text(page)
    listed = (KILLED, LIVED, EXPLAINED, GONE, KILLED_IN_PYTHON)
    run(tree, *listed, options=("--only", "csrc"))
    core, python = {"explained": 1, "killed": 1, "lived": 1, "wrong": 1}, {"not run": 1}
    assert score(tree) == {"csrc/core": core, "python": python}
    assert "5 edits, 40.0% killed or explained as the files are, 40.0%" in capsys.readouterr().out
    said = (tree / kept.PAGE).read_text()
    assert said.startswith("# Mistakes\n\n<!-- table mutants -->\n") and said.endswith("More.\n")
    assert "| | edits | killed | explained | lived | wrong | not run |\n" in said
    assert "| csrc/core | 4 | 1 | 1 | 1 | 1 | 0 |\n" in said
    assert "| all | 5 | 1 | 1 | 1 | 1 | 1 |\n" in said
    (tree / kept.PAGE).write_text(said.replace("40.0%", "100.0%", 1))
    assert not kept.is_published(tree)

    (tree / C_FILE).write_text(TREE[C_FILE] + "\n")
    assert score(tree) == {"csrc/core": {"before": 2, "not run": 2}, "python": {"not run": 1}}
    said = (tree / kept.PAGE).read_text()
    assert "5 edits, 0.0% killed or explained as the files are, 40.0% as they are or were" in said
    assert "| csrc/core | 4 | 2 | 2 |\n" in said


def test_what_only_a_time_out_killed_is_said(tree: Path) -> None:
    hangs = entry(C_FILE, "return n / 2;", "for (;;) ;", C_TEST)
    status, outcomes = run(tree, hangs, options=("--patience", "0.1"))  # a second
    assert (status, outcomes) == (0, ["killed"])
    found = kept.score(kept.Kept(tree), mutant_list.load(tree / "edits"))
    assert found["killed_by_a_timeout"] == 1


def test_the_score_that_is_published_is_that_of_its_file() -> None:
    assert kept.is_published(ROOT), "python tests/mutants/mutants.py --publish"


def test_a_campaign_that_died_leaves_no_edit_behind(tree: Path) -> None:
    run(tree, KILLED)
    left = tree / "build/mutants/ground0" / C_FILE
    left.write_text(TREE[C_FILE].replace("n / 2", "7"))
    subprocess.run(["make", "-s", "build/plain/test_half"], cwd=left.parents[2], check=True)
    status, outcomes = run(tree, LIVED)  # with 7 in place of a half, its test would fail
    assert (status, outcomes) == (1, ["lived"])


def test_a_sample_is_of_the_day(tree: Path) -> None:
    edits = [entry(PYTHON_FILE, "2 * n", f"{number} * n", PYTHON_TEST) for number in range(3, 40)]
    (tree / "edits/all.toml").write_text("\n".join(edits))
    listed = mutant_list.load(tree / "edits")

    def sample(day: str) -> list[str]:
        command = [sys.executable, str(HERE / "mutants.py"), "--list", "--sample", "5"]
        command += ["--day", day, "--edits", str(tree / "edits")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        return done.stdout.splitlines()

    assert len(sample("2026-11-22")) == 5 < len(listed)
    assert sample("2026-11-22") == sample("2026-11-22") != sample("2026-11-23")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (entry(C_FILE, "n / 2", "n / 2", C_TEST), "changes no text"),
        (entry(C_FILE, "n / 2", "n / 3", C_TEST, loses=""), "nothing that a user would lose"),
        (entry(C_FILE, "n / 2", "n / 3", C_TEST, lost="x"), "unknown: lost"),
        (KILLED + KILLED, "stands there twice"),
    ],
)
def test_an_entry_that_says_too_little_is_refused(tree: Path, text: str, complaint: str) -> None:
    (tree / "edits/all.toml").write_text(text)
    with pytest.raises(mutant_list.ListError, match=complaint):
        mutant_list.load(tree / "edits")


def test_every_edit_of_the_list_applies_and_its_tests_are_there() -> None:
    wrong = []
    for mutant in mutant_list.load(HERE / "edits"):
        try:
            text = mutant.apply((ROOT / mutant.file).read_text())
            if mutant.file.endswith(".py"):
                ast.parse(text)
        except (OSError, SyntaxError, mutant_list.ListError) as error:
            wrong.append(f"{mutant.file}: {error}")
        for test in mutant.tests:
            name = test.partition("::")[0]
            found = ROOT.glob(f"tests/c/*/{name.rpartition('/')[2]}.c")
            if not (ROOT / name).exists() if ".py" in name else not list(found):
                wrong.append(f"{mutant.file}: there is no test {test}")
    assert not wrong, "\n".join(wrong)


def test_what_tests_start_imports_the_copy_that_has_the_edit() -> None:
    """A path of its own in place of the campaign's leads to the tree that is installed, in which
    nothing is edited: every edit would live."""
    told = '"PYTHONPATH": (.*)'
    for path in (mutants.HERE.parent).rglob("*.py"):
        if path.name not in ("ground.py", Path(__file__).name):
            for value in re.findall(told, path.read_text()):
                assert "sys.path" in value or "join(paths)" in value, f"{path.name}: {value}"
