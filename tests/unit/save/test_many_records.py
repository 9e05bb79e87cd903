"""Files with more records, or longer names, than a load keeps are left to torch.load."""

from __future__ import annotations

import pytest
import stillframe
import torch
from stillframe import _core

MOST_RECORDS, MOST_NAME_BYTES = 1 << 20, 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nr_records", "name"),
    [(MOST_RECORDS + 1, "{}"), (MOST_NAME_BYTES // 1000 + 1, "{:01000}")],
    ids=["records", "names"],
)
def test_file_with_too_many_records_is_loaded_by_torch(nr_records, name, tmp_path):
    path = tmp_path / "x.pt"
    state = {"a": torch.arange(1000), "b": torch.ones(7)}
    torch.save(state, tmp_path / "small.pt")
    writer = torch._C.PyTorchFileWriter(str(path), True, 64)
    small = torch._C.PyTorchFileReader(str(tmp_path / "small.pt"))
    for record in set(small.get_all_records()) - {"version", ".data/serialization_id"}:
        data = small.get_record(record)
        writer.write_record(record, data, len(data))
    for number in range(nr_records):
        writer.write_record(name.format(number), b"", 0)
    writer.write_end_of_file()
    with path.open("rb") as file:
        found, core = _core.restore(file.fileno(), True)
    assert found["ok"] and found["num_records"] > nr_records
    assert core is None
    loaded = stillframe.load(path)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    into = {"a": torch.zeros(1000, dtype=torch.int64)}
    assert torch.equal(stillframe.load(path, into=into)["a"], state["a"])
