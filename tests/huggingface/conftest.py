"""Fixtures of the Hugging Face tests."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def pytest_collection_modifyitems(items):
    # The packages warn about themselves. Ours stay errors.
    filters = ("ignore", r"error:::stillframe(\..*)?")
    for item in items:
        if "huggingface" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings(*filters))


@pytest.fixture(autouse=True)
def in_its_directory(tmp_path, monkeypatch):
    """Run in an empty directory, so that the same arguments name other files in each test."""
    monkeypatch.chdir(tmp_path)
