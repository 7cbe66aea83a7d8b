import gc

import pytest
import torch

from inflight_runtime.types import Version
from inflight_runtime.weights.digest import manifest_digest, tensor_digest
from inflight_runtime.weights.memory import HostMemory
from inflight_runtime.weights.snapshot import SnapshotBuffers


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 5, generator=generator),
        "norm": torch.randn(3, generator=generator),
        "odd": torch.randn(11, generator=generator).to(torch.bfloat16),
        "count": torch.arange(3),
    }


def test_a_snapshot_holds_the_values_and_their_digests():
    named = weights()
    snapshot = SnapshotBuffers().capture(Version(1, 2), named.items())
    assert snapshot.version == Version(1, 2)
    assert [spec.name for spec in snapshot.specs] == list(named)
    for name, tensor in snapshot.tensors().items():
        assert torch.equal(tensor, named[name])
        assert tensor.dtype == named[name].dtype
    assert [spec.digest for spec in snapshot.specs] == [tensor_digest(tensor) for tensor in named.values()]
    assert snapshot.digest == manifest_digest(snapshot.specs)


def test_a_snapshot_does_not_change_when_training_goes_on():
    named = weights()
    before = {name: tensor.clone() for name, tensor in named.items()}
    snapshot = SnapshotBuffers().capture(Version(1, 1), named.items())
    for tensor in named.values():
        tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.tensors().items())


def test_floating_point_tensors_are_converted_and_others_are_not():
    snapshot = SnapshotBuffers().capture(Version(1, 1), weights().items(), torch.bfloat16)
    assert [spec.dtype for spec in snapshot.specs] == ["bfloat16", "bfloat16", "bfloat16", "int64"]
    by_name = SnapshotBuffers().capture(Version(1, 1), weights().items(), "bfloat16")
    assert by_name.digest == snapshot.digest


def test_a_snapshot_in_use_is_never_overwritten_and_memory_is_reused_afterwards():
    buffers = SnapshotBuffers()
    kept = [buffers.capture(Version(1, step), weights(step).items()) for step in range(4)]
    for step, snapshot in enumerate(kept):
        assert torch.equal(snapshot.tensors()["embed"], weights(step)["embed"])
    places = {snapshot.flat.data_ptr() for snapshot in kept}
    assert len(places) == 4
    view = kept[3].tensors()["embed"]  # a view alone must keep its memory, too
    del snapshot
    kept.clear()
    gc.collect()
    again = buffers.capture(Version(1, 5), weights(5).items())
    assert again.flat.data_ptr() in places
    assert torch.equal(view, weights(3)["embed"])


def test_steady_publishing_alternates_between_two_buffers():
    buffers = SnapshotBuffers()
    snapshot = buffers.capture(Version(1, 0), weights().items())
    places = set()
    for step in range(1, 20):
        snapshot = buffers.capture(Version(1, step), weights(step).items())
        if step > 2:
            places.add(snapshot.flat.data_ptr())
    assert len(places) == 2


def test_a_name_twice_and_no_tensors_are_refused():
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        SnapshotBuffers().capture(Version(1, 1), [("a", torch.zeros(1)), ("a", torch.zeros(1))])
    with pytest.raises(ValueError, match="no tensors"):
        SnapshotBuffers().capture(Version(1, 1), [])


def test_memory_is_aligned_and_not_shared_between_leases():
    memory = HostMemory()
    first = memory.lease(100)
    second = memory.lease(100)
    assert first.data_ptr() % 64 == 0
    assert second.data_ptr() % 64 == 0
    assert abs(first.data_ptr() - second.data_ptr()) >= 100
