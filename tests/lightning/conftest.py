"""Fixtures of the Lightning tests."""

import warnings

import pytest

with warnings.catch_warnings():  # what the packages say about themselves on import
    warnings.simplefilter("ignore")
    import fix_lightning


def pytest_collection_modifyitems(items):
    # Lightning warns about few workers, small loaders, missing loggers and more; these warnings are
    # ignored. Our own warnings are errors, except the one of on_error="warn". The last filter that
    # matches counts.
    filters = ("ignore", r"error:::stillframe(\..*)?", "ignore:a checkpoint was not saved")
    for item in items:
        if "lightning" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings(*filters))


@pytest.fixture(params=fix_lightning.PACKAGES)
def pkg(request):
    """Run the test with each of the two packages."""
    return fix_lightning.package(request.param)


@pytest.fixture
def lit():
    """Run the test with `lightning` only."""
    return fix_lightning.package("lightning")
