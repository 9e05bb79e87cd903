"""Plans that are kept between saves: which states may use them, and how many are kept."""

from typing import Any

import pytest
import torch
from fix_dcp import equal, loaded
from stillframe import dcp
from stillframe._dcp.joint import CachedPlan, Plans, structure


def of(value: Any, name: str = "w") -> Any:
    return structure({name: value}, {name: (name,)})


@pytest.mark.filterwarnings("ignore")  # torch warns about sparse tensors
def test_plan_is_reused_only_for_equal_names_shapes_and_types():
    one = torch.ones(3, 3)
    assert of(one) == of(torch.zeros(3, 3)) == of(torch.nn.Parameter(one, requires_grad=False))
    different = [
        of(one),
        of(one, "v"),
        of(torch.ones(3, 4)),
        of(one.double()),
        of(one.to_sparse()),
        of(one.clone().requires_grad_()),
        of(7),
    ]
    assert len(set(different)) == len(different)
    assert of(7) == of("seven")  # equal, because objects are written each time


def test_value_with_its_own_write_items_is_planned_each_time():
    class Own:
        def __create_write_items__(self, *_: Any) -> list[Any]:
            return []

    class Special(torch.Tensor):
        pass

    assert of(Own()) is None and of(torch.ones(3).as_subclass(Special)) is None


def test_states_that_differ_in_a_name_are_each_saved_correctly(tmp_path):
    for name in ("a", "b", "a"):
        state = {name: torch.full((3,), float(ord(name))), "step": 3}
        dcp.save(state, tmp_path / "c", no_dist=True)
        assert equal(loaded(state, tmp_path / "c"), state)


def test_least_recently_used_plan_is_dropped(monkeypatch):
    monkeypatch.setattr("stillframe._dcp.joint._MAX_PLANS", 3)
    plans, kept = Plans(), [CachedPlan(number, None, [], None, []) for number in range(4)]
    for number in (0, 1, 2, 2):
        plans.keep(number, kept[number])
    assert [plans.of(number) for number in range(3)] == kept[:3]
    for number in (0, 3):
        plans.keep(number, kept[number])
    assert [plans.of(number) for number in range(4)] == [kept[0], None, kept[2], kept[3]]
