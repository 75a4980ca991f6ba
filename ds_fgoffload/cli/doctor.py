"""``ds-fgoffload doctor``: what on this machine is in the way of offloading, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from ds_fgoffload.compat.versions import REMEDY, SUPPORTED
from ds_fgoffload.device.pinning import allocate_pinned
from ds_fgoffload.device.streams import Streams, accelerator_device, make_streams
from ds_fgoffload.host_memory.budget import cgroup_rooms, local_ranks, memlock_bytes, pin_remedy, room
from ds_fgoffload.host_memory.slabs import Region
from ds_fgoffload.text.sizes import human

_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
_PROBE_BYTES = 256 << 20
_SMALL_PROBE_BYTES = 32 << 20
"""Where copies are the processor's own work."""
_SLOW_LINK_GB_S = 10.0
_SMALL_SHM_BYTES = 1 * _GIB
_SMALL_SHARE_BYTES = 4 * _GIB
_LINK_FACTS = ("class", "vendor", "current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
_LEAST = {**{package: one.oldest for package, one in SUPPORTED.items()}, "pydantic": "2.7"}


class Verdict(Enum):
    """How much a finding is in the way."""

    OK = "OK"
    NOTE = "NOTE"
    FAIL = "FAIL"


_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(*, measure: bool, root: Path = Path("/"), home: Path | None = None) -> list[Finding]:
    """Everything; ``measure`` also pins memory and copies. ``root`` and ``home`` are where to look for system files."""
    findings = [*_versions(), _accelerator(), *_host_memory(root), _memlock(), _shared_memory(root), *_links(root)]
    findings += [*_environment(), *_locks(home or Path.home())]
    if measure:
        findings += _measured(accelerator_device())
    return findings


def exit_code(findings: Sequence[Finding]) -> int:
    """0, or 1 if something will not work, or 2 if there is something to note."""
    verdicts = {finding.verdict for finding in findings}
    return 1 if Verdict.FAIL in verdicts else 2 if Verdict.NOTE in verdicts else 0


def table(findings: Sequence[Finding]) -> Table:
    """One row each, the remedy under what was found."""
    shown = Table(title="ds-fgoffload doctor", title_justify="left", show_header=False, box=None, padding=(0, 1))
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style=_STYLES[finding.verdict])
        verdict = Text(f"[{finding.verdict.value}]", style=_STYLES[finding.verdict])
        shown.add_row(f"{finding.name} {'.' * (24 - len(finding.name))}", verdict, text)
    return shown


def as_json(findings: Sequence[Finding]) -> str:
    """A list of findings, in their order."""
    return json.dumps([{**asdict(finding), "verdict": finding.verdict.value} for finding in findings], indent=2)


def _versions() -> Iterator[Finding]:
    yield Finding("python", Verdict.OK, platform.python_version())
    for package in ("ds_fgoffload", "torch", "deepspeed", "pydantic", "transformers", "accelerate"):
        try:
            found = torch.__version__ if package == "torch" else version(package)  # it says what it was built for
        except PackageNotFoundError:
            if package in _LEAST:
                yield Finding(package, Verdict.FAIL, "not installed", f"pip install '{package}>={_LEAST[package]}'")
            continue
        least = _LEAST.get(package)
        if least is not None and Version(found) < Version(least):
            yield Finding(package, Verdict.FAIL, found, f"{least} or newer is needed: pip install -U {package}")
        elif package in SUPPORTED and SUPPORTED[package].is_newer(found):
            yield Finding(package, Verdict.NOTE, found, f"newer than what is tested ({SUPPORTED[package]}): {REMEDY}")
        else:
            yield Finding(package, Verdict.OK, found)


def _accelerator() -> Finding:
    device = accelerator_device()
    if device.type == "cpu":
        return Finding(
            "accelerator",
            Verdict.NOTE,
            "none: DeepSpeed computes on the CPU",
            "results can be tried here, not memory or speed; on a machine with a GPU, check that torch sees it",
        )
    if make_streams(device).synchronous:
        return Finding(
            "accelerator", Verdict.NOTE, f"{device}, without streams", "copies cannot run beside compute here"
        )
    return Finding("accelerator", Verdict.OK, str(device))


def _host_memory(root: Path) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    share = _share_bytes()
    found = f"{human(memory.available)} of {human(memory.total)} available; {human(share)} would be a rank's share here"
    remedy = "set host_pool.max_bytes, and count the ranks of the node" if share < _SMALL_SHARE_BYTES else ""
    yield Finding("host memory", Verdict.NOTE if remedy else Verdict.OK, found, remedy)
    rooms = cgroup_rooms(root)
    left_bytes = min((one.left_bytes for one in rooms), default=memory.available)
    if left_bytes < memory.available:
        yield Finding(
            "cgroup",
            Verdict.NOTE,
            f"a memory limit leaves {human(left_bytes)}, less than the system has",
            "give the container or job more memory; beyond its limit ranks are killed without a word (exit code -9)",
        )
    else:
        yield Finding("cgroup", Verdict.OK, "no memory limit below what the system has")


def _memlock() -> Finding:
    limit = memlock_bytes()
    if limit is None:
        return Finding("memlock", Verdict.OK, "unlimited for this process")
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    shown = f"{human(limit)} (hard limit: {'unlimited' if hard == resource.RLIM_INFINITY else human(hard)})"
    if limit >= _share_bytes():
        return Finding("memlock", Verdict.OK, shown)
    remedy = (
        "CUDA's pinned memory is not bound by it, what is locked otherwise (DS_PIN_MEMORY_BACKEND=native) is; "
        "where pinning fails: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity for services"
    )
    return Finding("memlock", Verdict.NOTE, shown, remedy)


def _shared_memory(root: Path) -> Finding:
    path = root / "dev/shm"
    if not path.is_dir():
        return Finding(_SHM, Verdict.NOTE, "not there", "mount a tmpfs on it: ranks of a node share memory there")
    usage = psutil.disk_usage(str(path))
    shown = f"{human(usage.free)} of {human(usage.total)} free"
    if usage.free >= _SMALL_SHM_BYTES:
        return Finding(_SHM, Verdict.OK, shown)
    return Finding(_SHM, Verdict.NOTE, shown, "docker run --shm-size=8g (or --ipc=host): NCCL and loaders need it")


def _links(root: Path) -> Iterator[Finding]:
    """PCIe as it is trained now, of display and accelerator devices."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        facts = {name: _line(device / name) for name in _LINK_FACTS}
        is_accelerator = facts["class"].startswith(("0x0302", "0x0300", "0x1200"))
        if not is_accelerator or facts["vendor"] not in {"0x10de", "0x1002", "0x8086", "0x19e5"}:
            continue
        now = f"{facts['current_link_speed'] or '?'} x{facts['current_link_width'] or '?'}"
        most = f"{facts['max_link_speed'] or '?'} x{facts['max_link_width'] or '?'}"
        name = f"PCIe {device.name}"
        if facts["current_link_width"] == facts["max_link_width"]:
            yield Finding(name, Verdict.OK, f"{now} (at most {most}); an idle device may run its link slower")
        else:
            remedy = "fewer lanes than the device has: another slot, a riser, or the machine's firmware settings"
            yield Finding(name, Verdict.NOTE, f"{now}, at most {most}", remedy)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _environment() -> Iterator[Finding]:
    if os.environ.get("DS_PIN_MEMORY_BACKEND") == "native":
        yield Finding(
            "DS_PIN_MEMORY_BACKEND",
            Verdict.NOTE,
            "native: memory is locked but not registered with the device",
            "unset it: copies out of such memory may block",
        )
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if accelerator_device().type != "cpu" and "expandable_segments:True" not in settings:
        yield Finding(
            "device allocator",
            Verdict.NOTE,
            "default segments",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps freed memory usable where sizes vary",
        )


def _locks(home: Path) -> Iterator[Finding]:
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or home / ".cache/torch_extensions")
    for lock in sorted(folder.glob("**/lock")):
        yield Finding(
            "extension lock",
            Verdict.NOTE,
            f"{lock} is there",
            "if nothing is compiling now, a killed run has left it and every run will wait for it: delete the file",
        )


def _measured(device: torch.device) -> Iterator[Finding]:
    if device.type == "cpu":
        yield Finding("link and pinning", Verdict.OK, "nothing to measure: no link and no pinned memory on a CPU alone")
        return
    streams = make_streams(device)
    yield from _measured_on(streams, _SMALL_PROBE_BYTES if streams.synchronous else _PROBE_BYTES)


def _measured_on(streams: Streams, size_bytes: int) -> Iterator[Finding]:
    began = time.perf_counter()
    try:
        host = _pinned(size_bytes)
    except (RuntimeError, MemoryError) as error:
        yield Finding(
            "pinning",
            Verdict.FAIL,
            f"{human(size_bytes)} refused: {error}",
            f"{pin_remedy()}; else set host_pool.pin_memory to false, which is slow",
        )
        return
    seconds = time.perf_counter() - began
    yield Finding(
        "pinning", Verdict.OK, f"{human(size_bytes)} in {seconds:.2f} s ({size_bytes / seconds / 1e9:.1f} GB/s)"
    )
    memory = streams.allocate(streams.compute(), size_bytes)
    for name, stream, destination, source in (
        ("link, device to host", streams.d2h, host, memory),
        ("link, host to device", streams.h2d, memory, host),
    ):
        rate = max(_copy_gb_s(streams, stream, destination, source) for _ in range(3))
        slow = rate < _SLOW_LINK_GB_S
        remedy = "PCIe 4 x16 gives about 25 GB/s: look at the link above, and at who else uses it" if slow else ""
        yield Finding(name, Verdict.NOTE if slow else Verdict.OK, f"{rate:.1f} GB/s", remedy)


def _pinned(size_bytes: int) -> torch.Tensor:
    """As the host pool takes its slabs."""
    region = Region.reserve(0, size_bytes, size_bytes)
    return region.memory[:size_bytes] if region.extend(size_bytes, pin=True) else allocate_pinned(size_bytes)


def _share_bytes() -> int:
    return room().left_bytes // 2 // local_ranks()


def _copy_gb_s(streams: Streams, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> float:
    streams.synchronize(streams.fence(streams.compute()))
    began = time.perf_counter()
    streams.copy(stream, destination, source)
    streams.synchronize(streams.fence(stream))
    return source.numel() / (time.perf_counter() - began) / 1e9
