"""What plans are made from, in a file: a later run makes the same plans before its first step.

The file is JSON: what model, engine and machine it is of, and for each class of size the rounds that are known of it.
A plan follows from these alone (:mod:`~ds_fgoffload.planning.tuner`), so none is in the file, and nothing in it is
evaluated. It is written in a thread of its own, whole or not at all.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_fgoffload.errors import PlanFileError
from ds_fgoffload.profiling.profile import ProfiledMoment, RoundProfile
from ds_fgoffload.profiling.recorder import Recorded
from ds_fgoffload.schedule.plan import Kind, Moment, Place, Site
from ds_fgoffload.text.messages import warn_here
from ds_fgoffload.text.sizes import human

FORMAT = 1
MOST_DIFFERENCES = 4
"""That a message lists."""
SLOWER = 0.75
"""A link that carries less than this part of what it did when the file was written is another one."""

Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(allow_inf_nan=False)]
BytesPerMs = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class UnitOnFile(_Part):
    """A module whose saved tensors are offloaded or recomputed."""

    module_class: str
    parameter_elements: Count
    """In it and below, whole, as if nothing were partitioned."""
    recompute: bool = False


class ModelOnFile(_Part):
    """What decides where something is saved."""

    model_class: str
    engine: str
    """``no engine``, or the class of DeepSpeed's engine with its ZeRO stage."""
    ranks: Count
    min_tensor_bytes: Count
    excluded: list[str]
    units: dict[str, UnitOnFile]

    def differences(self, here: ModelOnFile) -> Iterator[str]:
        """Where ``here`` differs, in words."""
        for name in ("model_class", "engine", "ranks", "min_tensor_bytes", "excluded"):
            in_file, found = getattr(self, name), getattr(here, name)
            if in_file != found:
                yield f"{name} {found!r} instead of {in_file!r}"
        for name in {**self.units, **here.units}:
            in_file, found = self.units.get(name), here.units.get(name)
            if found is None:
                yield f"unit {name} is not here"
            elif in_file is None:
                yield f"unit {name} is not in the file"
            elif in_file != found:
                yield f"unit {name} is {_unit(found)} instead of {_unit(in_file)}"


class MachineOnFile(_Part):
    """The device."""

    device: str
    memory_bytes: Count

    def differences(self, here: MachineOnFile) -> Iterator[str]:
        if self.device != here.device:
            yield f"device {here.device} instead of {self.device}"
        if self.memory_bytes != here.memory_bytes:
            yield f"{human(here.memory_bytes)} of device memory instead of {human(self.memory_bytes)}"


class PlaceOnFile(_Part):
    """Where something happens in a round."""

    micro_batch: Count
    unit: str
    call: int = 0
    save: int = -1

    @classmethod
    def of(cls, place: Place) -> PlaceOnFile:
        return cls(micro_batch=place.ordinal, unit=place.site.unit, call=place.site.call, save=place.site.save)

    def place(self) -> Place:
        return Place(self.micro_batch, Site(self.unit, self.call, self.save))


class MomentOnFile(PlaceOnFile):
    """A moment of a round."""

    kind: Literal["landmark", "opened", "closed", "saved", "backward", "needed"]

    @classmethod
    def of_moment(cls, moment: Moment) -> MomentOnFile:
        (ordinal, (unit, call, save)), kind = moment.place, moment.kind.name.lower()
        return cls.model_validate({"kind": kind, "micro_batch": ordinal, "unit": unit, "call": call, "save": save})

    def moment(self) -> Moment:
        return Moment(Kind[self.kind.upper()], self.place())


class RoundOnFile(_Part):
    """A round that was measured. Lists have an entry for each of its moments."""

    moments: list[Count]
    """Numbers in the file's list of moments."""
    at_ms: list[Milliseconds]
    saved_bytes: list[Count]
    memory_bytes: list[Count]
    """Empty: memory was not asked for."""
    read_at_ms: dict[str, Milliseconds]
    """When a read of the device was over, by the entry's number."""
    d2h_bytes_per_ms: BytesPerMs
    h2d_bytes_per_ms: BytesPerMs
    held: list[PlaceOnFile]
    stalled_ms: Milliseconds
    guessed: bool
    sizes: list[Count]
    peak_between_bytes: Count

    @model_validator(mode="after")
    def _lists_match(self) -> RoundOnFile:
        count = len(self.moments)
        if not count or len(self.at_ms) != count or len(self.saved_bytes) != count:
            raise ValueError("moments, at_ms and saved_bytes have as many entries, one at least")
        if len(self.memory_bytes) not in {0, count}:
            raise ValueError("memory_bytes has as many entries as moments, or none")
        if any(later < earlier for earlier, later in zip(self.at_ms, self.at_ms[1:], strict=False)):
            raise ValueError("at_ms does not go back")
        if not all(key.isdecimal() and int(key) < count for key in self.read_at_ms):
            raise ValueError("read_at_ms has the numbers of entries as keys")
        return self


class ClassOnFile(_Part):
    """The known rounds of about one size."""

    size: Count
    caution: Annotated[float, Field(ge=1, le=2)]
    """By how much copies are taken to be slower than was measured."""
    rounds: Annotated[list[RoundOnFile], Field(min_length=1)]


class PlanFile(_Part):
    """The whole file."""

    format: Literal[1] = 1
    written_at: str
    versions: dict[str, str]
    rank: Count
    model: ModelOnFile
    machine: MachineOnFile
    max_overhead: float | None
    """As it was configured in the run that wrote the file; the run that reads it plans by its own."""
    target_saved_bytes: Count | None
    moments: list[MomentOnFile]
    classes: Annotated[list[ClassOnFile], Field(min_length=1)]

    @model_validator(mode="after")
    def _moments_are_there(self) -> PlanFile:
        count = len(self.moments)
        if any(number >= count for one in self.classes for each in one.rounds for number in each.moments):
            raise ValueError(f"a round names a moment that is not in the list of {count}")
        return self

    def known(self) -> Iterator[tuple[int, float, list[Recorded]]]:
        """Of each class its size, its caution and its rounds, the oldest first."""
        moments = [one.moment() for one in self.moments]
        for one in self.classes:
            yield one.size, one.caution, [_recorded(each, moments) for each in one.rounds]


class Header(_Part):
    """Which model, machine and rank the file is written for."""

    versions: dict[str, str]
    rank: Count
    model: ModelOnFile
    machine: MachineOnFile
    max_overhead: float | None = None
    target_saved_bytes: Count | None = None


Known = Sequence[tuple[int, float, Sequence[Recorded]]]
"""Size, caution and rounds of each class."""


class PlanStore:
    """The plan file of an attachment.

    Args:
        path: of this rank's file; it need not be there yet.
        header: what is trained here, and on what.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._thread: threading.Thread | None = None
        self._told = False

    def known(self) -> list[tuple[int, float, list[Recorded]]]:
        """What the file holds; nothing if there is none, or if it does not match, which is logged."""
        if not self._path.exists():
            return []
        try:
            found = read(self._path)
        except PlanFileError as error:
            self._refuse(str(error))
            return []
        differences = [
            *found.model.differences(self._header.model), *found.machine.differences(self._header.machine)
        ]  # fmt: skip
        if differences:
            more = len(differences) - MOST_DIFFERENCES
            shown = "; ".join(differences[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            self._refuse(f"{self._path} was written for something else: {shown}")
            return []
        return list(found.known())

    def refuse_link(self, there_bytes_per_ms: float, here_bytes_per_ms: float) -> None:
        """The link turns out to be slower."""
        then, now = (f"{human(round(rate * 1000))}/s" for rate in (there_bytes_per_ms, here_bytes_per_ms))
        self._refuse(f"{self._path} was written for a link to the host of {then}, and this one carries {now}")

    def write(self, known: Known) -> None:
        """Writes the file in a thread of its own, unless the last is not written yet."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, args=(known,), name="ds_fgoffload plan file")
            self._thread.start()

    def finish(self) -> None:
        """Waits until what was to be written is."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, known: Known) -> None:
        try:
            write(self._path, file_of(self._header, known))
        except OSError as error:
            if not self._told:
                self._told = True
                warn_here(f"fine_grained_offload.plan_file: {self._path} cannot be written: {error}; training goes on")

    def _refuse(self, why: str) -> None:
        warn_here(f"fine_grained_offload.plan_file: {why}. Training goes on without it; the file will be overwritten")


def file_of(header: Header, known: Known) -> PlanFile:
    """The plan file of what is known."""
    numbers: dict[Moment, int] = {}
    classes = [
        ClassOnFile(size=size, caution=caution, rounds=[_on_file(each, numbers) for each in rounds])
        for size, caution, rounds in known
    ]
    return PlanFile(
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        moments=[MomentOnFile.of_moment(moment) for moment in numbers],
        classes=classes,
        **dict(header),
    )


def read(path: Path) -> PlanFile:
    """The file at ``path``.

    Raises:
        PlanFileError: it cannot be read, or is no plan file, or one of another format.
    """
    try:
        return PlanFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PlanFileError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PlanFileError(
            f"{path} is not a plan file of format {FORMAT}: {where}: {first['msg']} "
            f"({error.error_count()} fault{'s' if error.error_count() > 1 else ''})"
        ) from None


def write(path: Path, content: PlanFile) -> None:
    """Puts the file at ``path``, in place of one that is there; its folder is made. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(content.model_dump_json(), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def of_rank(path: str, rank: int, ranks: int) -> Path:
    """Each rank has a file of its own: ``{rank}`` in the path is its number; where it is not, the name gets it."""
    if "{rank}" in path:
        return Path(path.replace("{rank}", str(rank)))
    plain = Path(path)
    return plain if ranks == 1 else plain.with_name(f"{plain.stem}.rank{rank}{plain.suffix}")


def is_slower(known: Iterable[Recorded], now: Iterable[Recorded]) -> tuple[float, float] | None:
    """Rates to the host then and now, if the link carries much less in each of the rounds of ``now``."""
    then = min((one.profile.d2h_bytes_per_ms for one in known), default=0.0)
    found = max((one.profile.d2h_bytes_per_ms for one in now), default=math.inf)
    return (then, found) if found < SLOWER * then else None


def _unit(unit: UnitOnFile) -> str:
    what = "recomputed, " if unit.recompute else ""
    return f"{what}{unit.module_class} with {unit.parameter_elements} elements"


def _on_file(recorded: Recorded, numbers: dict[Moment, int]) -> RoundOnFile:
    profile = recorded.profile
    passed = profile.passed
    # Made of our own numbers: what was checked when it was measured is not checked again.
    return RoundOnFile.model_construct(
        moments=[numbers.setdefault(each.moment, len(numbers)) for each in passed],
        at_ms=_forward(each.at_ms for each in passed),
        saved_bytes=[each.size_bytes for each in passed],
        memory_bytes=[each.memory_bytes for each in passed] if recorded.with_memory else [],
        read_at_ms={str(n): each.read_at_ms for n, each in enumerate(passed) if each.read_at_ms is not None},
        d2h_bytes_per_ms=profile.d2h_bytes_per_ms,
        h2d_bytes_per_ms=profile.h2d_bytes_per_ms,
        held=[PlaceOnFile.of(place) for place in sorted(profile.held)],
        stalled_ms=profile.stalled_ms,
        guessed=profile.guessed,
        sizes=list(profile.sizes),
        peak_between_bytes=recorded.peak_between_bytes,
    )


def _forward(times_ms: Iterable[float]) -> list[float]:
    """Times that events on two streams gave may go back by less than their resolution."""
    latest, found = -math.inf, []
    for at_ms in times_ms:
        latest = max(latest, at_ms)
        found.append(latest)
    return found


def _recorded(of_file: RoundOnFile, moments: Sequence[Moment]) -> Recorded:
    reads: Mapping[str, float] = of_file.read_at_ms
    memory = of_file.memory_bytes or [0] * len(of_file.moments)
    passed = [
        ProfiledMoment(moments[moment], at_ms, saved_bytes, memory_bytes, reads.get(str(number)))
        for number, (moment, at_ms, saved_bytes, memory_bytes) in enumerate(
            zip(of_file.moments, of_file.at_ms, of_file.saved_bytes, memory, strict=True)
        )
    ]
    profile = RoundProfile(
        passed,
        of_file.d2h_bytes_per_ms,
        of_file.h2d_bytes_per_ms,
        frozenset(one.place() for one in of_file.held),
        of_file.stalled_ms,
        of_file.guessed,
        tuple(of_file.sizes),
    )
    return Recorded(profile, None, bool(of_file.memory_bytes), of_file.peak_between_bytes)
