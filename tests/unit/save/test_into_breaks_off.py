"""load(into=...) that fails while it writes: the error says that the targets are half written."""

import errno
import functools

import pytest
import stillframe
import torch
from fix_checkpoints import by_stillframe
from stillframe._base import records
from stillframe._load import fill as fill_module
from stillframe._load import into as into_module
from stillframe._load import load as load_module
from stillframe._load import restore as restore_module


def state():
    return {"a": torch.arange(300_000.0), "b": torch.arange(1000.0).view(20, 50).t(), "step": 3}


def zeros():
    return {"a": torch.zeros(300_000), "b": torch.zeros(50, 20), "step": 0}


def _notes(error: pytest.ExceptionInfo[BaseException]) -> str:
    return " ".join([str(error.value), *getattr(error.value, "__notes__", [])])


def test_out_of_memory_in_a_load_reports_partly_written_targets(tmp_path, monkeypatch):
    by_stillframe(state(), tmp_path / "x.pt")

    def run_out(nbytes, device="cpu"):
        raise MemoryError("no memory")

    monkeypatch.setattr(restore_module, "new_storage", run_out)
    with pytest.raises(MemoryError, match="no memory") as error:
        stillframe.load(tmp_path / "x.pt", into=zeros())
    assert "what into= names is half written" in _notes(error)


def test_error_of_a_second_read_reports_partly_written_targets(tmp_path, monkeypatch):
    by_stillframe(state(), tmp_path / "x.pt")

    def turns_out_to_be_for_torch(self):
        self._plan.tensors[0][1].fill_(7)
        self._core.close()
        raise records.RestoreFailed(records.Failure(-errno.EOPNOTSUPP, "data/0", 0, None))

    monkeypatch.setattr(fill_module.Fill, "run", turns_out_to_be_for_torch)
    target = zeros()
    assert stillframe.load(tmp_path / "x.pt", into=target) is target
    assert torch.equal(target["a"], state()["a"]) and torch.equal(target["b"], state()["b"])
    assert target["step"] == 3
    for raised in (MemoryError("no memory"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", functools.partial(_raise, raised))
            with pytest.raises(type(raised)) as error:
                stillframe.load(tmp_path / "x.pt", into=zeros())
        assert "what into= names is half written" in _notes(error)


def _raise(error, *_, **__):
    raise error


def test_failed_copy_in_a_load_reports_partly_written_targets(tmp_path, monkeypatch):
    by_stillframe(state(), tmp_path / "x.pt")
    monkeypatch.setattr(load_module, "_plan_from_pickle", lambda *_: None)
    monkeypatch.setattr(into_module, "copy_tensor", functools.partial(_raise, MemoryError()))
    with pytest.raises(MemoryError) as error:
        stillframe.load(tmp_path / "x.pt", into=zeros())
    assert "what into= names is half written" in _notes(error)


def test_load_that_wrote_nothing_does_not_report_partly_written_targets(tmp_path):
    by_stillframe(state(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="does not fit") as error:
        stillframe.load(tmp_path / "x.pt", into={"none": torch.zeros(3)})
    assert "half written" not in _notes(error)
