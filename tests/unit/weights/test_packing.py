import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_runtime.protocol import TensorSpec
from inflight_runtime.weights.packing import offsets, plan_buckets, tensor_bytes, torch_dtype, unpack

layouts = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "uint8", "int64"]), st.lists(st.integers(0, 9), max_size=3)).map(
        lambda pair: pair
    ),
    max_size=15,
).map(
    lambda pairs: [
        TensorSpec(name=f"t{index}", dtype=dtype, shape=shape, digest="") for index, (dtype, shape) in enumerate(pairs)
    ]
)


@given(layouts)
def test_tensors_are_aligned_and_do_not_overlap(specs):
    starts, total = offsets(specs)
    position = 0
    for start, spec in zip(starts, specs, strict=True):
        assert start % 16 == 0
        assert start >= position
        assert start - position < 16
        position = start + tensor_bytes(spec)
    assert position <= total
    assert total % 16 == 0


@given(layouts, st.integers(16, 2000))
def test_buckets_tile_the_buffer_within_the_limit(specs, limit):
    buckets = plan_buckets(specs, limit)
    starts, total = offsets(specs)
    position = 0
    for bucket in buckets:
        assert bucket.start == position
        assert 0 < bucket.size <= limit
        position = bucket.end
        # Whole tensors, or one piece of a tensor larger than the limit.
        if bucket.stop - bucket.first > 1:
            assert bucket.completes
            assert bucket.start <= starts[bucket.first]
    assert position == total
    for index, spec in enumerate(specs):
        if tensor_bytes(spec):
            ends = [bucket for bucket in buckets if bucket.first <= index < bucket.stop and bucket.completes]
            assert len(ends) == 1


def test_a_tensor_larger_than_a_bucket_has_buckets_of_its_own():
    specs = [TensorSpec(name=name, dtype="uint8", shape=[size], digest="") for name, size in [("a", 16), ("b", 80)]]
    specs.append(TensorSpec(name="c", dtype="uint8", shape=[8], digest=""))
    found = [(b.start, b.end, b.first, b.stop, b.completes) for b in plan_buckets(specs, 39)]
    assert found == [
        (0, 16, 0, 1, True),
        (16, 48, 1, 2, False),
        (48, 80, 1, 2, False),
        (80, 96, 1, 2, True),
        (96, 112, 2, 3, True),
    ]


@settings(deadline=None)
@given(layouts)
def test_unpack_gives_back_what_was_packed_without_copying(specs):
    starts, total = offsets(specs)
    flat = torch.zeros(total, dtype=torch.uint8)
    sources = []
    for start, spec in zip(starts, specs, strict=True):
        source = torch.randint(0, 100, spec.shape).to(torch_dtype(spec.dtype))
        flat[start : start + tensor_bytes(spec)] = source.reshape(-1).view(torch.uint8)
        sources.append(source)
    unpacked = unpack(flat, specs)
    assert [name for name, _ in unpacked] == [spec.name for spec in specs]
    for (_, tensor), source in zip(unpacked, sources, strict=True):
        assert tensor.dtype == source.dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, source)
        assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_unpack_of_a_part_of_a_larger_buffer_looks_at_that_part():
    specs = [TensorSpec(name="a", dtype="int32", shape=[2, 2], digest="")]
    memory = torch.arange(8, dtype=torch.int32).view(torch.uint8)
    assert unpack(memory[16:], specs)[0][1].tolist() == [[4, 5], [6, 7]]


def test_unpack_refuses_a_buffer_that_is_too_short():
    specs = [TensorSpec(name="a", dtype="float32", shape=[5], digest="")]
    with pytest.raises(ValueError, match="of 32 bytes"):
        unpack(torch.zeros(31, dtype=torch.uint8), specs)


def test_a_bucket_smaller_than_the_alignment_is_refused():
    with pytest.raises(ValueError, match="at least 16"):
        plan_buckets([], 15)


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="'float31' is not a torch dtype"):
        tensor_bytes(TensorSpec(name="a", dtype="float31", shape=[1], digest=""))
