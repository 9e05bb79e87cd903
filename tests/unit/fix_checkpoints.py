"""Makes checkpoint files of every writer, and damages them in every way."""

import contextlib
import io
import os
import zipfile

import stillframe
import torch
from fix_processes import warm_sockets
from torch.utils.serialization import config


def small_state():
    """Return a tree like a state_dict, with an empty storage, a view and a tie."""
    weight = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    return {
        "weight": weight,
        "tied": weight,
        "view": weight[3:7, ::2],
        "empty": torch.empty(0),
        "step": torch.tensor(7),
        "name": "small",
    }


def same(a, b):
    """Return whether two `small_state`s are equal, ties included."""
    return (
        a.keys() == b.keys()
        and all(torch.equal(a[k], b[k]) for k in a if k != "name")
        and a["name"] == b["name"]
        and a["weight"] is a["tied"]
        and a["view"].untyped_storage().data_ptr() == a["weight"].untyped_storage().data_ptr()
    )


@contextlib.contextmanager
def saving(**options):
    """Change torch.save's configuration inside the block."""
    before = {name: getattr(config.save, name) for name in options}
    for name, value in options.items():
        setattr(config.save, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config.save, name, value)


def by_path(state, path):
    torch.save(state, path)


def by_buffer(state, path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


def without_crc(state, path):
    with saving(compute_crc32=False):
        torch.save(state, path)


def aligned_to_a_page(state, path):
    with saving(storage_alignment=4096):
        torch.save(state, path)


def by_stillframe(state, path):
    stillframe.save(state, path)


def legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


WRITERS = [by_path, by_buffer, without_crc, aligned_to_a_page, by_stillframe, legacy]


def sparse(path, nbytes):
    """Write a complete checkpoint with one storage of `nbytes`, which takes no space on the
    disk."""
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(nbytes, dtype=torch.uint8)}, path)


def open_descriptors():
    """Return this process's open descriptors, without the one that lists them and those of the
    tests' own processes."""
    return sorted(
        fd
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}") and int(fd) not in warm_sockets
    )


def flip(path, at, bit=0):
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def offset_of_storage(path, key="weight"):
    """Return the offset in the file of the bytes of a tensor's storage."""
    with torch.serialization.skip_data(), torch._subclasses.FakeTensorMode():
        return torch.load(path)[key].untyped_storage()._checkpoint_offset


@contextlib.contextmanager
def unprivileged():
    """Drop root's right to read everything inside the block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def pack(path, packed, *, without=()):
    """Pack an archive as another program does; omit the records whose names end with `without`."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
        for name in old.namelist():
            if not name.endswith(without):
                new.writestr(name, old.read(name))
    return packed
