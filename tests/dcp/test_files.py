"""The data files of a rank: distribution of items, formats, errors; and collectives of ranks."""

import datetime
import io
import pickle
import sys
import traceback
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fix_waits import eventually
from stillframe._dcp import checkpoint
from stillframe._dcp.checkpoint import DataFile, Item, RankFiles, buckets
from stillframe._dcp.location import Directory
from stillframe._dcp.ranks import Groups, Ranks, _to_picklable_error
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan


def test_objects_come_first_and_files_have_similar_sizes():
    state = {"a": torch.zeros(1000), "text": "hello", "b": torch.zeros(1000)}
    items = create_default_local_save_plan(state, is_coordinator=True).items
    found = buckets(items, 2, one_item_a_file=False)
    assert [[item.index.fqn for item in bucket] for bucket in found] == [["text", "a"], ["b"]]


BASE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        BASE[1:3, ::2],
        torch.ones(3, 1).expand(3, 5),
    ],
    ids=["conjugate", "negative", "gaps", "expanded"],
)
def test_view_is_laid_out_without_the_rest_of_its_storage(tensor):
    """torch.save would write the view's whole storage."""
    assert not isinstance(Item(tensor).row, memoryview)


@pytest.mark.parametrize("kind", ["sparse", "compressed", "quantized"])
@pytest.mark.filterwarnings("ignore")  # torch warns about each of these kinds
def test_tensor_without_a_storage_of_its_own_is_saved_by_torch(kind):
    tensor = {
        "sparse": torch.Tensor.to_sparse,
        "compressed": torch.Tensor.to_sparse_csr,
        "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8).t(),
    }[kind](BASE)
    found = torch.load(io.BytesIO(Item(tensor).row), weights_only=True)
    assert (found.layout, found.dtype) == (tensor.layout, tensor.dtype)
    values = (
        each.dequantize() if each.is_quantized else each.to_dense() for each in (found, tensor)
    )
    assert torch.equal(*values)


def test_written_file_releases_the_memory_owners_of_its_items(tmp_path):
    item = Item(torch.ones(1000))
    alive = weakref.ref(item.owner)
    file = DataFile("data", [item])
    del item
    file.start(Directory(str(tmp_path)).make_submit_function(durable=False, engine=None))
    assert file.failure() is None
    assert eventually(lambda: alive() is None)


def test_failure_to_start_a_file_removes_all_files(tmp_path):
    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    items = create_default_local_save_plan(state, is_coordinator=True).items
    found = buckets(items, 2, one_item_a_file=True)
    directories = iter([tmp_path, tmp_path / "missing"])
    files = RankFiles(
        found,
        lambda item: state[item.index.fqn],
        Directory(""),
        lambda _: str(next(directories) / "x"),
    )
    first = files._files[0]
    with pytest.raises(OSError, match="missing"):
        files.start(durable=False, engine=None)
    assert first.failure() is None  # its write has begun
    assert list(tmp_path.iterdir()) == []


def test_at_most_thread_count_files_are_made():
    state = {str(number): torch.zeros(1) for number in range(7)}
    items = create_default_local_save_plan(state, is_coordinator=True).items
    for most in range(1, 8):
        assert len(buckets(items, most, one_item_a_file=False)) <= most


def test_files_are_balanced_by_bytes_including_objects():
    state = {"w": torch.zeros(4096), **{str(number): number for number in range(17)}}
    items = create_default_local_save_plan(state, is_coordinator=True).items
    found = buckets(items, 2, one_item_a_file=False)
    assert [len(bucket) for bucket in found] == [17, 1]


def test_file_reports_offset_and_length_of_each_item(tmp_path):
    state = {"a": torch.zeros(1000), "b": torch.zeros(10)}
    items = create_default_local_save_plan(state, is_coordinator=True).items
    location = Directory(str(tmp_path))
    files = RankFiles([items], lambda item: state[item.index.fqn], location, lambda _: "x")
    for result in files.results():
        assert result.size_in_bytes == result.storage_data.length
        assert result.size_in_bytes >= state[result.index.fqn].nbytes


def test_file_name_id_fits_into_one_exchanged_number():
    assert all(0 <= checkpoint.new_id() < 1 << 32 for _ in range(20))


def test_item_saved_by_torch_drops_requires_grad():
    tensor = torch.ones(3, dtype=torch.float8_e4m3fn).requires_grad_()
    item = Item(tensor)
    assert isinstance(item.row, memoryview)
    found = torch.load(io.BytesIO(item.row), weights_only=True)
    assert not found.requires_grad and found.tolist() == tensor.tolist()


class Ended:
    def __init__(self, error):
        self.error, self.waited = error, False

    def failure(self):
        self.waited = True
        return self.error


def test_first_error_counts_and_every_file_is_waited_for():
    files = RankFiles([], None, None, None)
    first, second = OSError("first"), OSError("second")
    files._files = [Ended(None), Ended(first), Ended(None), Ended(second)]
    assert files.wait_and_get_first_failure() is first
    assert all(file.waited for file in files._files)


def test_exchange_of_too_many_numbers_is_refused():
    ranks = Ranks(None, [])
    assert ranks.exchange(1, 2, 3, 4, 5, 6, 7) == [[1, 2, 3, 4, 5, 6, 7]]
    # otherwise another rank would use those names
    with pytest.raises(ValueError, match="room for 7"):
        ranks.exchange(1, 2, 3, 4, 5, 6, 7, 8)


class _Frame(traceback.FrameSummary):
    """A frame summary as in Python 3.13: it references code, which cannot be pickled."""

    __slots__ = ("_code",)


def test_error_whose_traceback_cannot_be_pickled_is_sent_to_all_ranks(monkeypatch):
    def extracted(_):
        frame = _Frame("a.py", 1, "f")
        frame._code = extracted.__code__
        return traceback.StackSummary.from_list([frame])

    if sys.version_info < (3, 13):
        monkeypatch.setattr(traceback, "extract_tb", extracted)
    try:
        raise OSError("full")
    except OSError as error:
        sent, frames = pickle.loads(pickle.dumps(_to_picklable_error(error)))
    assert str(sent) == "full" and len(frames) == 1


def test_busy_vote_uses_the_timeout_of_the_group(one_rank, monkeypatch):
    limit, made, make = datetime.timedelta(minutes=2), [], dist.new_group
    given = make(backend="gloo", timeout=limit)

    def noted(**options: Any) -> Any:
        made.append(options["timeout"])
        return make(**options)

    monkeypatch.setattr(dist, "new_group", noted)
    groups = Groups()
    for _ in range(2):
        assert groups.any_rank_votes_true(groups.get_or_create_save_group(given), True)
    assert made == [limit, limit]  # one array for saves, one for calls
