"""The documentation: its programs run, its links work, and the reference has every public name."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stillframe
import stillframe.dcp
import stillframe.lightning
import stillframe.offload
import yaml

EXTRAS = {"stillframe.accelerate", "stillframe.transformers"}
MODULES = [stillframe, stillframe.dcp, stillframe.lightning, stillframe.offload]
for extra in sorted(EXTRAS):
    with contextlib.suppress(ImportError):
        MODULES.append(importlib.import_module(extra))

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN = [page for page in PAGES if "\n```python\n" in page.read_text()]
RUN += [ROOT / "README.md", *sorted((ROOT / "examples").glob("*.ipynb"))]


def _name(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pages")
    command = [sys.executable, Path(__file__).with_name("run_pages.py"), directory, *RUN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("page", RUN, ids=_name)
def test_every_python_block_runs_and_prints_what_the_page_says(page, verdicts):
    wrong = verdicts[str(page)]
    assert wrong is None, wrong


def test_every_output_follows_the_block_that_prints_it():
    for page in PAGES:
        text = page.read_text()
        followed = re.findall(r'^```\n\n```text title="prints"', text, re.M)
        assert len(followed) == text.count('title="prints"'), page


def _entries() -> set[str]:
    """Return the names that have an entry in the reference."""
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    return {*re.findall(r"^::: ([\w.]+)$", text, re.M), *re.findall(r"\{ #([\w.]+) \}", text)}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_public_name_has_an_entry_in_the_reference(module):
    entries = _entries()
    missing = [n for n in module.__all__ if f"{module.__name__}.{n}" not in entries]
    assert not missing


def test_every_entry_of_the_reference_is_a_name():
    for entry in _entries():
        module, _, name = entry.rpartition(".")
        if module in EXTRAS and module not in sys.modules:
            continue
        assert hasattr(sys.modules[module], name), entry


def _in_nav(node: object) -> set[str]:
    if isinstance(node, str):
        return {node}
    parts = node.values() if isinstance(node, dict) else node
    return set().union(*map(_in_nav, parts))


def test_every_page_is_in_the_navigation_and_nothing_else():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert _in_nav(nav) == set(map(_name, PAGES))


def test_the_glossary_has_at_most_40_terms_and_names_files_that_exist():
    rows = re.findall(
        r"^\| \*\*([^*]+)\*\* \|.*\| `([^`]+)` \|$", (DOCS / "glossary.md").read_text(), re.M
    )
    assert 30 <= len(rows) <= 40
    assert len({term for term, _ in rows}) == len(rows)
    for term, owner in rows:
        assert (ROOT / owner).is_file(), f"{term}: {owner}"


def _anchors(page: Path) -> set[str]:
    """Return a page's anchors: slugs of headings as Markdown makes them, and explicit ones."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = set(re.findall(r"^::: ([\w.]+)$", prose, re.M))
    for heading in re.findall(r"^#+ (.+)$", prose, re.M):
        given = re.search(r"\{ #(\S+) \}", heading)
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(given[1] if given else re.sub(r"[-\s]+", "-", words))
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_internal_link_leads_to_a_file_and_a_heading(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert target.is_relative_to(DOCS), f"{link} is not part of the site"
        if anchor:
            assert anchor in _anchors(target), link


def test_a_broken_link_fails_the_build_of_the_site():
    makefile, site = (ROOT / "Makefile").read_text(), (ROOT / "mkdocs.yml").read_text()
    (build,) = [line for line in makefile.splitlines() if "-m mkdocs" in line]
    assert "--strict" in build
    assert "--quiet" not in build, "it hides the warnings from --strict too"
    for what in ("not_found", "anchors", "absolute_links", "unrecognized_links"):
        assert f"{what}: warn" in site
