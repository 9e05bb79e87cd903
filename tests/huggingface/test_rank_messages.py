"""The messages between ranks about a checkpoint, through a store in one process."""

from __future__ import annotations

import datetime
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from stillframe._huggingface import ranks
from stillframe.errors import StillframeError


@pytest.fixture
def pair(monkeypatch):
    """The leader and the other rank, whose process group has a timeout of 0.2 seconds."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.2))
    monkeypatch.setattr(ranks, "_get_default_store", lambda: store)
    monkeypatch.setattr(ranks, "_numbers", iter([0, 0]))
    return [ranks.Ranks(rank, 0, range(1, 2)) for rank in range(2)]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_rank_that_sends_nothing_is_named_and_fails_the_checkpoint(pair, tmp_path, caplog):
    leader, _ = pair
    with (
        caplog.at_level(logging.WARNING, "stillframe"),
        pytest.raises(StillframeError, match=r"rank 1: nothing came from it in 0\.2 s.*all ranks"),
        ranks.lead(leader, 0, lambda: str(tmp_path)),
    ):
        pass
    (record,) = caplog.records
    assert "a checkpoint waits for rank 1" in record.getMessage()


@pytest.mark.usefixtures("impatient")
def test_rank_that_joins_too_late_gets_the_leaders_error(pair, tmp_path):
    leader, other = pair
    with pytest.raises(StillframeError), ranks.lead(leader, 0, lambda: str(tmp_path)):
        pass
    late = pytest.raises(StillframeError, match=r"failed on rank 0.*nothing came")
    with late, other.follow(0, "checkpoint"):
        raise AssertionError("it was let in")


@pytest.mark.usefixtures("impatient")
def test_rank_whose_leader_sends_nothing_gets_an_error(pair):
    _, other = pair
    with pytest.raises(StillframeError, match="rank 0: nothing came"), other.follow(0, "c"):
        raise AssertionError("it was let in")


def test_directory_that_one_rank_does_not_see_is_an_error_on_both_ranks(pair, tmp_path):
    leader, other = pair

    def lead():
        with ranks.lead(leader, 0, lambda: str(tmp_path / "elsewhere")):
            pass

    with ThreadPoolExecutor() as pool:
        leading = pool.submit(lead)
        seen = pytest.raises(StillframeError, match="c is written by a rank on another machine")
        with seen, other.follow(0, "c"):
            raise AssertionError("it was let in")
        assert "failed on rank 1" in str(leading.exception())


def test_nothing_of_a_checkpoint_stays_in_the_store(pair, tmp_path):
    leader, other = pair

    def follow():
        with other.follow(0, "c") as directory:
            (tmp_path / "file").touch()
            return directory

    with ThreadPoolExecutor() as pool:
        following = pool.submit(follow)
        with ranks.lead(leader, 0, lambda: str(tmp_path)):
            pass
        assert following.result() == str(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
    assert leader._store.num_keys() == 0
