"""Memory from the system: what is taken, what lies side by side, and that all of it goes back."""

import ctypes
import errno
import os
from pathlib import Path

import pytest
import torch

from ds_fgoffload.host_memory import slabs as region_module
from ds_fgoffload.host_memory.slabs import HUGE_PAGE_BYTES, PAGE_BYTES, Region, Slab, near_processors, touch

KIB, MIB = 1 << 10, 1 << 20


def resident_bytes(region):
    """What the kernel says lies in memory of the region."""
    pages = region.memory[: 64 * MIB].numel() // PAGE_BYTES
    flags = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * PAGE_BYTES)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(region.memory.data_ptr()), size, flags) == 0
    return sum(flag & 1 for flag in flags) * PAGE_BYTES


def mapped(address):
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    spans = [[int(number, 16) for number in line.split(maxsplit=1)[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in spans)


def test_address_space_takes_no_memory_until_a_slab_is_taken_and_none_after_it_went_back():
    region = Region.reserve(0, 64 << 30, PAGE_BYTES)
    assert region.memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert (resident_bytes(region), region.top) == (0, 0)
    assert region.extend(4 * MIB, pin=False)
    assert region.extend(MIB, pin=False)
    assert resident_bytes(region) == 5 * MIB
    assert region.top == 5 * MIB
    region.memory[: 5 * MIB].fill_(3)
    region.release(region.slabs[0])
    assert resident_bytes(region) == MIB
    assert int(region.memory[4 * MIB]) == 3
    region.release(region.slabs[0])
    assert (resident_bytes(region), region.top, region.slabs) == (0, 0, [])


def test_the_last_view_takes_the_address_space_away():
    region = Region.reserve(0, MIB, PAGE_BYTES)
    view = region.memory[:1]
    address = view.data_ptr()
    del region
    assert mapped(address)
    del view
    assert not mapped(address)


def test_where_address_space_is_short_less_is_reserved(monkeypatch):
    real, asked = region_module.mmap.mmap, []

    def short(descriptor, size, flags):
        asked.append(size)
        if size > 8 * MIB:
            raise OSError(errno.ENOMEM, "no")
        return real(descriptor, size, flags=flags)

    monkeypatch.setattr(region_module.mmap, "mmap", short)
    assert Region.reserve(0, 64 * MIB, MIB).memory.numel() == 4 * MIB
    assert len(asked) == 5
    with pytest.raises(MemoryError, match=f"no address space for {16 * MIB} bytes"):
        Region.reserve(0, 64 * MIB, 16 * MIB)


def test_a_refused_slab_leaves_nothing(monkeypatch):
    def refuse(address, size_bytes):
        raise RuntimeError("no")

    region = Region.reserve(0, 8 * MIB, PAGE_BYTES)
    monkeypatch.setattr(region_module, "register_host", refuse)
    with pytest.raises(RuntimeError, match="no"):
        region.extend(MIB, pin=True)
    monkeypatch.setattr(region_module, "register_host", lambda address, size_bytes: False)
    assert not region.extend(MIB, pin=True)
    assert (region.slabs, resident_bytes(region)) == ([], 0)


def test_what_was_registered_is_unregistered(monkeypatch):
    registered = {}
    monkeypatch.setattr(
        region_module, "register_host", lambda address, size: bool(registered.update({address: size}) or 1)
    )
    monkeypatch.setattr(region_module, "unregister_host", registered.pop)
    region = Region.reserve(0, 8 * MIB, PAGE_BYTES)
    region.extend(MIB, pin=True)
    region.extend(MIB, pin=False)
    region.extend(MIB, pin=True)
    base = region.memory.data_ptr()
    assert registered == {base: MIB, base + 2 * MIB: MIB}
    for slab in list(region.slabs):
        region.release(slab)
    assert registered == {}


def test_borders_lie_where_one_registration_ends(monkeypatch):
    region = Region.reserve(1000, 8 * MIB, PAGE_BYTES)
    region.extend(MIB, pin=False)
    region.extend(MIB, pin=False)
    assert region.borders(1000, 1000 + 2 * MIB) == ()  # nothing is registered
    region.extend(MIB, pin=True)
    assert region.borders(1000, 1000 + MIB) == ()
    assert region.borders(1000 + MIB, 1000 + 2 * MIB) == ()
    assert region.borders(1000 + MIB - 1, 1000 + MIB + 1) == (1,)
    assert region.borders(1000, 1000 + 3 * MIB) == (MIB, 2 * MIB)


@pytest.mark.parametrize("size", [PAGE_BYTES, 20 * MIB, 20 * MIB + PAGE_BYTES])
def test_pages_are_touched_by_several_threads(monkeypatch, size):
    touched = []

    def noted(address, size_bytes, near):
        touched.append((address, size_bytes))
        touch_by_one(address, size_bytes, near)

    touch_by_one = region_module._touch
    region = Region.reserve(0, size, PAGE_BYTES)
    monkeypatch.setattr(region_module, "_touching_threads", lambda: 3)
    monkeypatch.setattr(region_module, "_touch", noted)
    address = region.memory.data_ptr()
    touch(address, size)
    spans = sorted((begin, begin + length) for begin, length in touched)
    assert (spans[0][0], spans[-1][1], sum(end - begin for begin, end in spans)) == (address, address + size, size)
    assert len(touched) == (3 if size > MIB else 1)
    assert size <= resident_bytes(region) < size + HUGE_PAGE_BYTES


@pytest.mark.parametrize(
    ("near", "found"),
    [("0", {0}), ("0-63", set()), ("900-901", set()), (None, set())],
    ids=["some", "all", "not allowed", "?"],
)
def test_pages_are_touched_next_to_the_device(monkeypatch, tmp_path, near, found):
    near_processors.cache_clear()
    monkeypatch.setattr(region_module.os, "sched_getaffinity", lambda who: {0, 1})
    monkeypatch.setattr(region_module, "pci_address", lambda: "0000:17:00.0")
    folder = tmp_path / "bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    if near is not None:
        (folder / "local_cpulist").write_text(f"{near}\n")
    assert near_processors(tmp_path) == found
    near_processors.cache_clear()


def test_a_thread_runs_where_it_may_again_after_touching(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(region_module, "near_processors", lambda: frozenset({min(before)}))
    region = Region.reserve(0, MIB, PAGE_BYTES)
    assert region.extend(MIB, pin=False)
    assert os.sched_getaffinity(0) == before


def test_memory_of_the_accelerator_goes_back_with_its_last_view():
    region = Region.of(10, torch.empty(PAGE_BYTES, dtype=torch.uint8))
    assert (region.slabs, region.is_mapped) == ([Slab(10, 10 + PAGE_BYTES, registered=False)], False)
    region.memory.fill_(5)
    kept = region.memory
    region.release(region.slabs[0])
    assert int(kept.sum()) == 5 * PAGE_BYTES  # not ours to discard
