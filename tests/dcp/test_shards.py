"""ShardedTensors are taken apart for the copy and made again over the copies, in any container.

These tests use one rank; test_many_ranks.py tests those of FSDP1."""

from collections import OrderedDict
from typing import Any

import pytest
import stillframe.dcp
import torch
from stillframe._dcp.shards import replace_sharded_tensors, restore_sharded_tensors
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import load

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch warns about every ShardedTensor
    pytest.mark.usefixtures("one_rank"),
]


def sharded(value: float, **options: Any) -> Any:
    """Return a ShardedTensor of four rows in two shards, both on this rank."""
    halves = [ShardMetadata([row, 0], [2, 3], "rank:0/cpu") for row in (0, 2)]
    tensor = sharded_tensor.empty(EnumerableShardingSpec(halves), 4, 3, **options)
    with torch.no_grad():
        for number, shard in enumerate(tensor.local_shards()):
            shard.tensor.fill_(value + number)
    return tensor


def values(tensor: Any) -> list[float]:
    return [float(shard.tensor.unique()) for shard in tensor.local_shards()]


def test_a_state_with_sharded_tensors_is_saved_as_it_was_at_the_call(tmp_path):
    state = {"a": sharded(1), "deep": {"b": sharded(3)}, "c": torch.ones(2)}
    response = stillframe.dcp.async_save(state, tmp_path / "c")
    for tensor in (state["a"], state["deep"]["b"]):
        for shard in tensor.local_shards():
            shard.tensor.zero_()
    response.upload_completion.result()
    found = {"a": sharded(0), "deep": {"b": sharded(0)}, "c": torch.zeros(2)}
    load(found, checkpoint_id=tmp_path / "c")
    assert values(found["a"]) == [1, 2] and values(found["deep"]["b"]) == [3, 4]


def test_sharded_tensors_taken_apart_for_a_copy_are_put_together_again(tmp_path):
    one, other = sharded(1, requires_grad=True), torch.ones(2)  # requires_grad is in the metadata
    tree = {"in": [{"a": one}, (one, "b")], "beside": [other]}
    apart = replace_sharded_tensors(tree)
    assert [each.tolist() for each in apart["in"][0]["a"]] == [[[1] * 3] * 2, [[2] * 3] * 2]
    assert apart["beside"] is tree["beside"]  # subtrees without ShardedTensors are unchanged
    again = restore_sharded_tensors(apart)
    for new in (again["in"][0]["a"], again["in"][1][0]):
        assert type(new) is type(one) and new is not one and values(new) == [1, 2]
        assert new.metadata() == one.metadata() and new.sharding_spec() == one.sharding_spec()
        mine = [shard.metadata for shard in new.local_shards()]
        assert mine == [shard.metadata for shard in one.local_shards()]
    assert type(again["in"][1]) is tuple and again["in"][1][1] == "b"


def test_tree_without_sharded_tensors_is_returned_unchanged():
    tree = OrderedDict(a=[torch.ones(1)], b=(1, [2]), c={})
    assert replace_sharded_tensors(tree) is tree and restore_sharded_tensors(tree) is tree
