"""Every geometry comes back in every bit, over the storage itself and over a copy of its bytes anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ds_fgoffload.saved.tensors import Layout, checksum, storage_bytes

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def random_bytes(size_bytes):
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)


def filled(dtype, elements):
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,)).bool()
    return random_bytes(elements * dtype.itemsize).view(dtype)


def same(found, expected):
    """Equal in bits (NaN too), dtype, size, stride and device."""
    geometry = Layout.of(found)[:3] == Layout.of(expected)[:3] and found.device == expected.device
    return geometry and torch.equal(bits(found), bits(expected))


def bits(tensor):
    if not tensor.numel():
        return torch.empty(0)
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def copied_into(tensor, before):
    """The bytes of the storage under ``tensor``, ``before`` bytes into a larger one, as they lie in a parcel."""
    content = storage_bytes(tensor)
    parcel = random_bytes(before + content.numel() + 16)
    parcel[before : before + content.numel()] = content
    return parcel[before : before + content.numel()]


GEOMETRIES = {
    "whole": lambda t: t,
    "matrix": lambda t: t.view(6, 4),
    "transposed": lambda t: t.view(6, 4).t(),
    "permuted": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    "slice": lambda t: t[5:11],
    "steps": lambda t: t[1::3],
    "columns": lambda t: t.view(4, 6)[:, 2:5],
    "narrow": lambda t: t.view(4, 6).narrow(0, 2, 1),
    "chunk": lambda t: t.view(4, 6).chunk(3, dim=-1)[1],
    "expanded": lambda t: t[3:4].expand(5, 3, 1),
    "scalar": lambda t: t[7],
    "no elements": lambda t: t[4:4],
    "no rows": lambda t: t.view(4, 6)[2:2, 1:],
    "overlapping": lambda t: t.as_strided((5, 4), (2, 1), 3),
    "turned around": lambda t: t.as_strided((3, 2), (1, 7), 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_view_is_the_same_over_its_storage_and_over_a_copy(dtype, geometry):
    whole = filled(dtype, 24)
    view = GEOMETRIES[geometry](whole)
    layout = Layout.of(view)
    assert same(layout.over(whole), view)
    assert layout.over(whole).storage_offset() == view.storage_offset()
    assert same(layout.over(whole[3:5]), view)
    assert same(layout.over(whole[:0]), view)
    for before in (0, 512):
        assert same(layout.within(copied_into(whole, before)), view)


@pytest.mark.parametrize("seen_as", DTYPES, ids=str)
@pytest.mark.parametrize("saved_as", [d for d in DTYPES if d is not torch.bool], ids=str)
def test_two_dtypes_over_one_storage(saved_as, seen_as):
    most = 2 if torch.bool in (saved_as, seen_as) else 256  # any other byte is no bool
    whole = torch.randint(0, most, (48,), dtype=torch.uint8)
    saved, alias = whole.view(saved_as)[1:], whole.view(seen_as)[2:-1]
    assert same(Layout.of(saved).over(alias), saved)
    assert same(Layout.of(saved).within(copied_into(alias, 512)), saved)


@pytest.mark.parametrize("size_bytes", [9, 10, 11, 13, 15])
def test_a_storage_whose_bytes_no_dtype_divides(size_bytes):
    content = random_bytes(size_bytes)
    storage = storage_bytes(content).untyped_storage()
    for dtype in (torch.int64, torch.float32, torch.int16, torch.uint8):
        view = torch.empty(0, dtype=dtype).set_(storage, 0, (size_bytes // dtype.itemsize,))
        for alias_dtype in (torch.uint8, torch.int16, torch.float32, torch.int64):
            alias = torch.empty(0, dtype=alias_dtype).set_(storage, 0, (1,))
            assert same(Layout.of(view).over(alias), view)
        assert same(Layout.of(view).within(copied_into(view, 512)), view)


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    other=st.sampled_from([d for d in DTYPES if d is not torch.bool]),
    sizes=st.lists(st.integers(0, 4), max_size=4),
    strides=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    offset=st.integers(0, 9),
    spare=st.integers(0, 17),
)
def test_any_geometry_at_all(dtype, other, sizes, strides, offset, spare):
    strides = strides[: len(sizes)]
    elements = offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    content = torch.randint(
        0, 2 if dtype is torch.bool else 256, (elements * dtype.itemsize + spare,), dtype=torch.uint8
    )
    whole = torch.empty(0, dtype=dtype).set_(content.untyped_storage(), 0, (elements,))
    view = whole.as_strided(sizes, strides, offset)
    alias = torch.empty(0, dtype=other).set_(content.untyped_storage(), 0, (0,))
    assert same(Layout.of(view).over(alias), view)
    assert same(Layout.of(view).within(copied_into(view, 512)), view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int16], ids=str)
def test_views_share_the_version_counter_of_what_they_are_made_from(dtype):
    whole = torch.zeros(8, dtype=dtype)
    first, second = Layout.of(whole[1:3]).over(whole), Layout.of(whole.view(torch.uint8)).over(whole)
    first.fill_(1)
    assert whole._version == second._version == 1
    part = copied_into(whole, 512).data
    Layout.of(whole[1:3]).within(part).fill_(2)
    assert part._version == Layout.of(whole).within(part)._version == 1


def test_storage_bytes_are_all_bytes_of_the_storage_and_no_copy():
    whole = torch.arange(12.0)
    view = whole.view(3, 4).t()[1:2]
    content = storage_bytes(view)
    assert content.shape == (48,)
    content.zero_()
    assert torch.equal(whole, torch.zeros(12))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("begin", "elements"), [(0, 1), (1, 7), (3, 5000), (0, 4096)])
def test_a_checksum_tells_of_one_bit_and_of_an_exchange(dtype, begin, elements):
    tensor = filled(dtype, 8192)[begin : begin + elements]
    known = checksum(tensor)
    assert torch.equal(checksum(tensor.clone()), known)
    other = tensor.clone()
    other.view(torch.uint8)[-1] ^= 1
    assert not torch.equal(checksum(other), known)
    turned = tensor.roll(elements // 2)
    assert torch.equal(checksum(turned), known) == torch.equal(bits(turned), bits(tensor))
