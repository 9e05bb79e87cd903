"""The source distribution is complete, and the check of a wheel works."""

from __future__ import annotations

import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/wheel"))
from wheel import complaints_of_binary, glibc_of  # type: ignore[import-not-found] # noqa: E402

sys.path.pop(0)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    directory = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "-e", directory]
    command += ["sdist", "-d", directory]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = directory.glob("*.tar.gz")
    return tarfile.open(made)


def test_a_source_distribution_is_the_whole_tree(sdist):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("this is no checkout")
    there = {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}
    inside = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert there - inside == set()
    made = {"PKG-INFO", "setup.cfg"}
    assert {n for n in inside - there - made if ".egg-info/" not in n} == set()


def test_links_and_pictures_of_the_readme_lead_somewhere_from_anywhere(sdist):
    member = next(m for m in sdist.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", m.name))
    metadata = email.message_from_bytes(sdist.extractfile(member).read())  # type: ignore[union-attr]
    text = metadata.get_payload()
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", text))
    assert len(links) > 5
    for link in links:
        assert link.startswith("https://"), link
        if path := re.match(rf"{source}/(?:blob|raw)/main/([^#]*)", link):
            assert (ROOT / path[1]).exists(), link


def test_links_of_the_readme_lead_somewhere_in_a_checkout():
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"):
        text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text())
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"[a-z]+:|#", link):
                assert (ROOT / link.partition("#")[0]).exists(), f"{page}: {link}"


def test_all_files_give_the_same_address_of_the_repository():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "CHANGELOG.md"))
    repository = r"https://[\w.]+/[\w-]+/stillframe(?=[/)\s])"
    found = {*re.findall(repository, pages + " ".join(urls.values()) + " ")}
    assert found == {urls["Source"]}


def test_all_files_give_the_same_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_debugging_symbols_and_a_builders_path_are_noticed(tmp_path):
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    source = tmp_path / "one.c"
    source.write_text('#include <stdlib.h>\nint one(void) { return atoi(getenv("ONE")); }\n')

    def linked(*flags: str) -> bytes:
        made = tmp_path / "one.so"
        command = [*compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        return made.read_bytes()

    assert complaints_of_binary(linked("-s")) == []
    assert len(complaints_of_binary(linked("-g"))) == 2
    path = complaints_of_binary(linked("-s", "-Wl,-rpath,/somewhere"))
    assert len(path) == 1 and "RUNPATH" in path[0]
    assert (2, 2) <= glibc_of(linked()) < (3, 0)
