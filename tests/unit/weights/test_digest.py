import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_runtime.protocol import TensorSpec
from inflight_runtime.weights import digest
from inflight_runtime.weights.digest import digests, manifest_digest, packed_digests, tensor_digest
from inflight_runtime.weights.packing import offsets, unpack

DTYPES = ["float32", "bfloat16", "float16", "int64", "uint8", "bool", "float64", "int8", "float8_e4m3fn"]
words = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200)


def as_floats(values):
    return torch.tensor(values, dtype=torch.int32).view(torch.float32)


@given(words, st.data())
def test_any_single_changed_byte_is_detected(values, data):
    tensor = as_floats(values)
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    position = data.draw(st.integers(0, raw.numel() - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    assert tensor_digest(changed) != tensor_digest(tensor)


@given(words, st.data())
def test_two_swapped_values_are_detected(values, data):
    first = data.draw(st.integers(0, len(values) - 1))
    second = data.draw(st.integers(0, len(values) - 1))
    swapped = list(values)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert (tensor_digest(as_floats(swapped)) == tensor_digest(as_floats(values))) == (swapped == values)


def test_two_flipped_signs_are_detected():
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(0))
    good = tensor_digest(tensor)
    for first, second in [(0, 1), (1, 3), (2, 499), (7, 8)]:
        changed = tensor.clone()
        changed[first] *= -1
        changed[second] *= -1
        assert tensor_digest(changed) != good


def test_values_that_swap_blocks_are_detected():
    tensor = torch.zeros(3 * digest.BLOCK + 5, dtype=torch.int32)
    tensor[10] = 1
    good = tensor_digest(tensor)
    for other in (10 + digest.BLOCK, 10 + 2 * digest.BLOCK, 3 * digest.BLOCK):
        moved = torch.zeros_like(tensor)
        moved[other] = 1
        assert tensor_digest(moved) != good


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(-3, 3), st.integers(0, 2**31))
def test_digest_is_the_same_formula_in_plain_integers(blocks, off, seed):
    count = max(1, blocks * 64 + off)
    values = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    weights = digest._weights(torch.device("cpu")).tolist()
    expected = 0
    for index, value in enumerate(values.tolist()):
        expected += value * weights[index % digest.BLOCK] * digest._block_weight(index // digest.BLOCK)
    assert tensor_digest(values) == f"{expected % 2**64:016x}"


@pytest.mark.parametrize("extra", [-1, 0, 1, 12345])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_the_accelerator_path_computes_the_same_over_many_blocks(dtype, extra, monkeypatch):
    monkeypatch.setattr(digest, "_ROWS_PER_KERNEL", 2)
    count = 5 * digest.BLOCK + extra
    values = torch.randint(0, 2**31, (count,), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert int(digest._device_sum(values)) % 2**64 == digest._cpu_sum(values) % 2**64


def test_layout_in_memory_does_not_matter():
    tensor = torch.randn(30, 40, dtype=torch.float64)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)
    assert tensor_digest(torch.nn.Parameter(tensor)) == tensor_digest(tensor)


specs = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 70), max_size=3)).map(
        lambda pair: TensorSpec(name="", dtype=pair[0], shape=pair[1], digest="")
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(specs, st.integers(0, 2**31))
def test_packed_digests_equal_those_of_the_tensors_one_by_one(layout, seed):
    _, total = offsets(layout)
    flat = torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    assert packed_digests(flat, layout) == digests([tensor for _, tensor in unpack(flat, layout)])


def test_packed_digests_ignore_the_padding_between_tensors():
    layout = [TensorSpec(name=name, dtype="float32", shape=[3], digest="") for name in "ab"]
    flat = torch.arange(32, dtype=torch.uint8)
    clean = packed_digests(flat, layout)
    flat[12:16] = 255
    flat[28:32] = 255
    assert packed_digests(flat, layout) == clean


def spec(name="a", dtype="float32", shape=(2, 3), value="00"):
    return TensorSpec(name=name, dtype=dtype, shape=list(shape), digest=value)


@pytest.mark.parametrize("other", [spec(name="b"), spec(dtype="int32"), spec(shape=(3, 2)), spec(value="01")])
def test_manifest_digest_covers_every_field(other):
    assert manifest_digest([spec()]) != manifest_digest([other])


def test_manifest_digest_covers_the_order():
    first, second = spec(name="a"), spec(name="b")
    assert manifest_digest([first, second]) != manifest_digest([second, first])
    assert manifest_digest([first, second]) == manifest_digest((first, second))
