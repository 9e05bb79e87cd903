"""The file image as its readers see it: torch.load in every mode, zipfile, unzip.

The C core's layout (archive/layout.c, archive/write.c) is compiled into a small library and driven
block by block, without an engine. That allows block sizes down to one page and files past 4 GiB.
The files are compared with those of torch.save for the same objects.
"""

import ctypes
import io
import os
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path

import fix_limits
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parents[3]
CORE = ROOT / "csrc" / "core"
DRIVER = """
#include "{header}"
int64_t drive(const char *path, const struct sfr_save_desc *desc, uint64_t block_bytes);
int64_t drive(const char *path, const struct sfr_save_desc *desc, uint64_t block_bytes)
{{
	return write_image(path, desc, block_bytes);
}}
int64_t drive_tensor(const char *path, uint64_t nbytes, uint64_t block_bytes);
int64_t drive_tensor(const char *path, uint64_t nbytes, uint64_t block_bytes)
{{
	return write_tensor(path, nbytes, block_bytes);
}}
"""
HOLE = 1  # an address that represents zeros that are never written (image_writer.h)
BLOCK_SIZES = [4096, 8192, 12288, 65536, 16 << 20]


class Source(ctypes.Structure):
    """struct sfr_source"""

    _fields_ = (
        ("addr", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("lane", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class SaveDesc(ctypes.Structure):
    """struct sfr_save_desc"""

    _fields_ = (
        ("dir", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("fs", ctypes.c_uint64),
        ("skeleton", ctypes.c_char_p),
        ("skeleton_len", ctypes.c_uint64),
        ("sources", ctypes.POINTER(Source)),
        ("nr_sources", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Compile the layout and the function that drives it."""
    build = tmp_path_factory.mktemp("image")
    driver, library = build / "driver.c", build / "driver.so"
    driver.write_text(DRIVER.format(header=ROOT / "tests" / "c" / "archive" / "image_writer.h"))
    names = ("layout", "write", "parts", "tensor")
    sources = [*(CORE / "archive" / f"{name}.c" for name in names), *CORE.glob("base/*.c")]
    command = os.environ.get("CC", "cc").split()
    command += [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-O2",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-I{CORE}",
        "-o",
        library,
    ]
    subprocess.run([*command, driver, *sources], check=True)
    return ctypes.CDLL(str(library))


class Limits(ctypes.Structure):
    """struct sfr_limits"""

    _fields_ = tuple((name, ctypes.c_uint64) for name in fix_limits.CORE)


@pytest.fixture(autouse=True)
def limits_of_library(library, limits):
    """Lower the limits of the compiled library too, which has a copy of its own."""
    there = Limits.in_dll(library, "sfr_limits")
    before = bytes(there)
    for name, value in limits.items():
        setattr(there, name, value)
    yield
    ctypes.memmove(ctypes.byref(there), before, len(before))


@pytest.fixture(scope="session")
def drive(library):
    """Return write(path, skeleton, rows of (addr, nbytes, lane), block_bytes), which returns the
    file's length."""
    function = library.drive
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.c_char_p, ctypes.POINTER(SaveDesc), ctypes.c_uint64)

    def write(path, skeleton, rows, block_bytes):
        array = (Source * len(rows))(*(Source(addr, n, lane, 0) for addr, n, lane in rows))
        desc = SaveDesc(b"", b"", 0, skeleton, len(skeleton), array, len(rows), 0)
        length = function(os.fsencode(path), ctypes.byref(desc), block_bytes)
        assert length > 0, os.strerror(-length)
        assert length == os.path.getsize(path)
        assert length % 4096 == 0
        return length

    return write


def state():
    """Return sizes around every boundary of pages and alignment, ties, views, empty and rare
    dtypes."""
    torch.manual_seed(1)
    sizes = [0, 1, 63, 64, 65, 4000, 4031, 4032, 4095, 4096, 4097, 8192, 20000, 300001]
    tree = {f"n{size}": torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes}
    tree["weight"] = torch.randn(37, 53)
    tree["tied"] = tree["weight"]
    tree["view"] = tree["weight"][3:9, ::2]
    tree["half"] = torch.randn(1000).to(torch.bfloat16)
    tree["complex"] = torch.randn(33, dtype=torch.complex64)
    tree["scalar"] = torch.tensor(3.5)
    tree["parameter"] = torch.nn.Parameter(torch.randn(5, 5))
    tree["plain"] = [1, "two", (3.0, None)]
    return tree


def bytes_of(storage):
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def storages_of(tree):
    """Return the distinct storages in the order in which torch.save numbers them."""
    found = {}
    for value in tree.values():
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype
        if isinstance(a[key], torch.Tensor)
        else a[key] == b[key]
        for key in a
    )


LANES = {
    "captured": lambda index: 0,
    "deferred": lambda index: 1,
    "mixed": lambda index: index % 2,
    "three lanes": lambda index: (index * 7) % 3,
}


@pytest.fixture(params=sorted(LANES))
def files(request, drive, tmp_path):
    """Return (tree, our file, torch.save's file)."""
    tree = state()
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    torch.save(tree, theirs)
    with zipfile.ZipFile(theirs) as archive:
        skeleton = archive.read("theirs/data.pkl")
    rows = [
        (storage.data_ptr(), storage.nbytes(), LANES[request.param](index))
        for index, storage in enumerate(storages_of(tree))
    ]
    drive(ours, skeleton, rows, BLOCK_SIZES[0])
    return tree, ours, theirs


def test_torch_load_reads_our_files_in_every_mode_like_its_own(files):
    tree, ours, theirs = files
    for options in (
        {},
        {"weights_only": False},
        {"mmap": True},
        {"mmap": True, "weights_only": False},
        {"map_location": "cpu"},
    ):
        a, b = torch.load(ours, **options), torch.load(theirs, **options)
        assert equal(a, tree), options
        assert equal(b, tree), options
        assert a["tied"].untyped_storage()._cdata == a["weight"].untyped_storage()._cdata
        assert a["view"].untyped_storage()._cdata == a["weight"].untyped_storage()._cdata
    assert equal(torch.load(io.BytesIO(ours.read_bytes())), tree)


def at_offsets(path, loaded, tree):
    """Return whether each loaded storage's _checkpoint_offset is that of its bytes in the file."""
    content = path.read_bytes()
    for key, tensor in loaded.items():
        if isinstance(tensor, torch.Tensor):
            storage, expected = tensor.untyped_storage(), tree[key].untyped_storage()
            offset = storage._checkpoint_offset
            assert offset % 64 == 0
            assert content[offset : offset + storage.nbytes()] == bytes_of(expected), key


def test_storages_of_meta_and_fake_loads_have_their_offsets_in_the_file(files):
    tree, ours, _ = files
    meta = torch.load(ours, map_location="meta")
    assert all(value.is_meta for value in meta.values() if isinstance(value, torch.Tensor))
    at_offsets(ours, meta, tree)
    with FakeTensorMode():
        fake = torch.load(ours)
    at_offsets(ours, fake, tree)
    assert fake["weight"].shape == tree["weight"].shape


def test_zip_readers_find_every_entry_whole(files):
    _, ours, theirs = files
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        assert a.testzip() is None
        own = {name.removeprefix("theirs/") for name in b.namelist()}
        assert {name.removeprefix("archive/") for name in a.namelist()} == own
        assert a.namelist()[0] == "archive/data.pkl"
        assert a.namelist()[-1] == "archive/.data/serialization_id"
        for info in a.infolist():
            name = info.filename.removeprefix("archive/")
            assert info.flag_bits == 0x0808
            assert info.compress_type == zipfile.ZIP_STORED
            if name == ".format_version":
                assert a.read(info) == b"0"
            elif name == ".data/serialization_id":
                assert len(a.read(info)) == 40
                assert a.read(info).isdigit()
            else:
                assert a.read(info) == b.read(f"theirs/{name}"), name
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-tq", ours], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in (done.stdout + done.stderr).lower()


def test_torchs_own_reader_gives_the_records_and_the_id(files):
    _, ours, _ = files
    reader = torch._C.PyTorchFileReader(str(ours))
    assert reader.get_record("version") == b"3\n"
    assert reader.get_record("byteorder") == b"little"
    assert reader.get_record(".storage_alignment") == b"64"
    assert len(reader.serialization_id()) == 40


@pytest.mark.parametrize("lanes", sorted(LANES))
def test_block_size_does_not_change_the_file(lanes, drive, tmp_path):
    """Because of this the other tests of a file's readers use one block size only."""
    tree = state()
    storages = enumerate(storages_of(tree))
    rows = [(s.data_ptr(), s.nbytes(), LANES[lanes](index)) for index, s in storages]
    contents = set()
    for block_bytes in BLOCK_SIZES:
        drive(tmp_path / "x", pickle.dumps("anything", protocol=2), rows, block_bytes)
        contents.add((tmp_path / "x").read_bytes())
    assert len(contents) == 1


GIB = 1 << 30
# Bytes and lane of each storage. Some headers are below 4 GiB and some above, and one storage is
# longer than that. Small storages between them have bytes; the large ones are holes.
LARGE = [(3, 0), (4 * GIB + 77, 0), (1000, 0), (5, 1), (64, 1), (0, 1)]


@pytest.fixture(scope="module")
def large(drive, tmp_path_factory):
    """Return (path, the small tensors by key) of a sparse file of more than four gigabytes."""
    where = tmp_path_factory.mktemp("large")
    with FakeTensorMode():
        tree = {f"t{i}": torch.empty(n, dtype=torch.uint8) for i, (n, _) in enumerate(LARGE)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tree, where / "outline.pt")  # only the pickle
    with zipfile.ZipFile(where / "outline.pt") as archive:
        skeleton = archive.read("outline/data.pkl")
    small = {
        f"t{i}": torch.randint(0, 255, (n,), dtype=torch.uint8)
        for i, (n, _) in enumerate(LARGE)
        if n < GIB
    }
    rows = [
        (small[f"t{i}"].data_ptr() if n < GIB else HOLE, n, lane)
        for i, (n, lane) in enumerate(LARGE)
    ]
    length = drive(where / "large.pt", skeleton, rows, 16 << 20)
    assert length > 4 * GIB
    assert os.stat(where / "large.pt").st_blocks * 512 < 200 << 20
    yield where / "large.pt", small
    (where / "large.pt").unlink()


def test_entries_past_4_gib_load(large):
    path, small = large
    loaded = torch.load(path, mmap=True)
    for i, (nbytes, _) in enumerate(LARGE):
        tensor = loaded[f"t{i}"]
        assert tensor.numel() == nbytes
        if nbytes < GIB:
            assert torch.equal(tensor, small[f"t{i}"])
        else:
            assert tensor[0] == tensor[-1] == tensor[nbytes // 2] == 0
    meta = torch.load(path, map_location="meta")
    with path.open("rb") as stream:
        for key, expected in small.items():
            stream.seek(meta[key].untyped_storage()._checkpoint_offset)
            assert stream.read(expected.numel()) == bytes_of(expected.untyped_storage())


@pytest.mark.product_limits
@pytest.mark.slow
def test_entries_past_4_gib_have_the_right_crc(large):
    path, small = large
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/1").file_size == 4 * GIB + 77
        for key, expected in small.items():
            assert archive.read(f"archive/data/{key[1:]}") == bytes_of(expected.untyped_storage())
        assert archive.testzip() is None
        others = [name for name in archive.namelist() if name != "archive/data/1"]
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    # The large one is left out, because it takes 20 seconds.
    command = ["unzip", "-tq", path, *others]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("nbytes", [3, 5 << 20, (1 << 32) - 1, (4 << 30) + 77])
def test_archive_of_a_tensor_of_any_size_is_read(library, tmp_path, nbytes):
    """The archive begins at byte 1 of a file, and the tensor's zeros are holes in the file."""
    function = library.drive_tensor
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)
    path = tmp_path / "parts"
    length = function(os.fsencode(path), nbytes, 16 << 20)
    assert length > nbytes, os.strerror(-length)
    os.truncate(path, length)
    with open(path, "rb") as file:
        start = 1
        with zipfile.ZipFile(_Behind(file, start)) as archive:
            assert archive.getinfo("archive/data/0").file_size == nbytes
            assert nbytes > GIB or archive.testzip() is None
            assert archive.read("archive/version") == b"3\n"


class _Behind(io.RawIOBase):
    """The part of a file from `start` on, as a file."""

    def __init__(self, file, start):
        self._file, self._start = file, start

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self._file.tell() - self._start

    def seek(self, offset, whence=os.SEEK_SET):
        shift = self._start if whence == os.SEEK_SET else 0
        return self._file.seek(offset + shift, whence) - self._start

    def readinto(self, buffer):
        return self._file.readinto(buffer)
