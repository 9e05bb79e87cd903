"""How the ranks of a Trainer agree on an error: what a rank sends, and what the others raise.

test_ranks.py and test_sharded.py run real ranks."""

import errno
import pickle
from types import SimpleNamespace

import pytest
import stillframe
import torch.distributed as dist
from stillframe._lightning import ranks


class Unreadable(Exception):
    """An exception that can be pickled but not unpickled, because its `args` lack an argument."""

    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")


@pytest.fixture
def agree(monkeypatch):
    """Return `agree(of_others, error, call_failed)`, which acts as rank 1; `of_others` are the
    other ranks' rows."""

    def asked(of_others, error=None, call_failed=False):
        rows = [(ranks._pickle_error(each), that) for each, that in of_others]

        def gather(into, own):
            into[:] = [rows[0], own, *rows[1:]]

        def decide(decision, all):
            return not all and (decision or any(each is not None for each, _ in of_others))

        monkeypatch.setattr(dist, "get_world_size", lambda: len(of_others) + 1)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        strategy = SimpleNamespace(reduce_boolean_decision=decide, global_rank=1)
        return ranks.agree(strategy, error, call_failed)

    return asked


def test_ranks_without_errors_raise_nothing(agree):
    assert agree([(None, False)], None, False) == (None, False)


def test_rank_raises_its_own_error_or_else_the_first_ranks(agree):
    own, full = ValueError("own"), stillframe.SaveError(errno.ENOSPC, "full", "a.ckpt", "write")
    assert agree([(full, False)], own)[0] is own
    raised, call_failed = agree([(None, False), (full, False), (KeyError("b"), False)])
    assert type(raised) is stillframe.SaveError and not call_failed
    assert (raised.errno, raised.filename, raised.phase) == (errno.ENOSPC, "a.ckpt", "write")
    assert raised.__notes__ == ["This was raised by rank 2; rank 1 ends with it."]


@pytest.mark.parametrize("own", [None, ValueError("own")])
def test_save_that_one_rank_could_not_begin_counts_as_not_made_on_all(agree, own):
    assert agree([(KeyError("a"), True)], own)[1]
    assert not agree([(KeyError("a"), False)], own)[1]


@pytest.mark.parametrize("error", [Unreadable("a.ckpt", "full"), ValueError(lambda: None)])
def test_error_that_cannot_be_unpickled_is_sent_as_text(agree, error):
    raised, _ = agree([(error, False)])
    assert type(raised) is stillframe.StillframeError
    assert str(raised).startswith(type(error).__name__)
    pickle.dumps(raised)


def test_ranks_without_a_process_group_count_as_one(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert not ranks.has_several_ranks(SimpleNamespace(world_size=2))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert ranks.has_several_ranks(SimpleNamespace(world_size=2))
    assert not ranks.has_several_ranks(SimpleNamespace(world_size=1))
