"""Fixtures of all tests. Those of one subject are in `fix_*.py`; README.md lists them."""

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The models of the tests are small: OpenMP's threads would mostly wait for each other. Torch reads
# this variable when it is imported, and so do programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fix_limits
import pytest
import stillframe
from fix_checkpoints import open_descriptors

ROOT = Path(__file__).parents[1]
# Modules that run a second time with every size threshold lowered (fix_limits.py).
LIMITED = (
    *(
        f"unit/save/test_{name}.py"
        for name in ("image", "into", "load", "load_safetensors", "load_ways", "parts", "save")
    ),
    "unit/test_round_trip.py",
    "unit/shell/test_verify.py",
    *(f"dcp/test_{name}.py" for name in ("check", "files", "shards", "writer")),
    "remote/test_load_urls.py",
)
TESTS = ROOT / "tests"
MIB = 1 << 20

# A forked child must not collect garbage of its parent. For example, a gloo process group of an
# earlier test joins threads that do not exist in the child, which hangs or crashes.
os.register_at_fork(after_in_child=gc.freeze)


# A shell starts background commands with SIGINT ignored, and their children inherit that. Tests and
# the programs that they start need the signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = Path(metafunc.module.__file__)
    if not path.is_relative_to(TESTS) or path.relative_to(TESTS).as_posix() not in LIMITED:
        return
    if metafunc.definition.get_closest_marker("product_limits") is None:
        metafunc.parametrize("limits", ["product", "low"], indirect=True)


@pytest.fixture(autouse=True)
def limits(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """Run a test with the product's size thresholds, or with lowered ones; return the core's."""
    if getattr(request, "param", "product") == "product":
        yield {}
        return
    with fix_limits.lowered():
        yield fix_limits.CORE
        # The thresholds must not change during a save.
        with contextlib.suppress(stillframe.StillframeError):
            stillframe.wait_all(timeout=60)


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    """Return an engine with small blocks, so that small states need several of them."""
    with stillframe.Engine(pool_bytes=64 * MIB, block_bytes=MIB) as engine:
        yield engine


@pytest.fixture
def no_descriptor_is_left() -> Iterator[None]:
    """Fail a test that leaves a file descriptor open.

    Descriptors of earlier tests' saves may be closed during the test.
    """
    before = set(open_descriptors())
    yield
    left = set(open_descriptors()) - before
    assert not left, [os.readlink(f"/proc/self/fd/{fd}") for fd in left]


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that is not on a tmpfs, where syncs would do nothing."""
    if file_system(tmp_path) != "tmpfs":
        yield tmp_path
        return
    if file_system(ROOT) == "tmpfs":
        pytest.skip("neither the temporary directory nor the checkout is on a disk")
    (ROOT / "build").mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="test-", dir=ROOT / "build"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def no_temporary_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves an unfinished save's temporary in its tmp_path.

    It waits for saves in flight first. The mark `leaves_temporaries` exempts a test, for example
    one that kills a writer.
    """
    path: Path | None = None
    if "tmp_path" in request.fixturenames:
        path = request.getfixturevalue("tmp_path")
    yield
    if path is None or request.node.get_closest_marker("leaves_temporaries"):
        return
    # A save that the test did not wait for may have failed; its temporary must be gone then too.
    with contextlib.suppress(stillframe.StillframeError):
        stillframe.wait_all(timeout=60)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    left = sorted(str(each) for each in path.rglob(f".stillframe-{boot}-*"))
    assert not left, f"temporaries left: {left}"


def file_system(path: Path) -> str:
    """Return the type of the file system that `path` is on, such as "ext4"."""
    found = ("", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4]
        if path.resolve().is_relative_to(mount) and len(mount) >= len(found[0]):
            found = (mount, right.split()[0])
    return found[1]
