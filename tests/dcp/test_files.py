"""A rank's data files from the inside: what goes into which, in what form, whose error counts; and
what ranks tell each other."""

import datetime
import io
import pickle
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stillframe._dcp.files import RankFiles, buckets
from stillframe._dcp.groups import Groups
from stillframe._dcp.image import Item
from stillframe._dcp.ranks import Ranks, _to_send
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan


def test_objects_come_first_and_every_file_gets_its_share():
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
def test_what_is_a_view_is_laid_out_as_what_it_shows(tensor):
    """And not packed by torch.save, which takes all of the storage behind it."""
    assert not isinstance(Item(tensor).row, memoryview)


def test_what_torch_packs_needs_no_gradient_there():
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


def test_the_first_of_several_errors_counts_and_every_file_is_waited_for():
    files = RankFiles([], None, "", None)
    first, second = OSError("first"), OSError("second")
    files._files = [Ended(None), Ended(first), Ended(None), Ended(second)]
    assert files.settle() is first
    assert all(file.waited for file in files._files)


def test_more_words_than_a_rank_has_room_for_are_refused():
    ranks = Ranks(None, [])
    assert ranks.words(1, 2, 3, 4, 5, 6, 7) == [[1, 2, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="room for 7"):  # else they would be another rank's
        ranks.words(1, 2, 3, 4, 5, 6, 7, 8)


class _Frame(traceback.FrameSummary):
    """As Python 3.13's: it holds its code, which no pickle takes."""

    __slots__ = ("_code",)


def test_an_error_goes_round_whose_frames_hold_their_code(monkeypatch):
    def extracted(_):
        frame = _Frame("a.py", 1, "f")
        frame._code = extracted.__code__
        return traceback.StackSummary.from_list([frame])

    if sys.version_info < (3, 13):
        monkeypatch.setattr(traceback, "extract_tb", extracted)
    try:
        raise OSError("full")
    except OSError as error:
        sent, frames = pickle.loads(pickle.dumps(_to_send(error)))
    assert str(sent) == "full" and len(frames) == 1


def test_ranks_ask_each_other_whether_they_are_busy_within_the_timeout_of_their_group(
    one_rank, monkeypatch
):
    limit, made, make = datetime.timedelta(minutes=2), [], dist.new_group
    given = make(backend="gloo", timeout=limit)

    def noted(**options: Any) -> Any:
        made.append(options["timeout"])
        return make(**options)

    monkeypatch.setattr(dist, "new_group", noted)
    groups = Groups()
    for _ in range(2):
        assert groups.any_rank(groups.of_saves(given), True)
    assert made == [limit, limit]  # one for saves, one for their calls
