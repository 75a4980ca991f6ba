"""What the user asks for: reads the ``fine_grained_offload`` section of ds_config.json, before any tensor exists.

The field docstrings below are the reference of the keys: ``docs/configuration.md`` is made from them. All that is read
here is plain JSON, and the user's dictionary is never changed: DeepSpeed dumps it as JSON while it starts.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, dict_raise_error_on_duplicate_keys
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.text.messages import warn
from ds_fgoffload.text.sizes import ByteSize

SECTION = "fine_grained_offload"


def _pattern(value: str) -> str:
    if not value.strip():
        raise ValueError("a pattern that is not empty")
    return value


Pattern = Annotated[StrictStr, BeforeValidator(lambda value: _pattern(value) if isinstance(value, str) else value)]


def _path(value: str) -> str:
    if value.strip() in {"", "auto"}:
        raise ValueError('the path of a file, such as "plans/run.json"')
    return value


FilePath = Annotated[StrictStr, BeforeValidator(lambda value: _path(value) if isinstance(value, str) else value)]


class _Section(DeepSpeedConfigModel):  # type: ignore[misc]  # DeepSpeed is not typed
    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)

    def __init__(self, /, **data: Any) -> None:
        # Not DeepSpeedConfigModel.__init__: it drops every value that is "auto", and a key named "strict", unseen.
        BaseModel.__init__(self, **data)


class HostPoolConfig(_Section):
    """The host memory that offloaded tensors lie in."""

    max_bytes: ByteSize | None = None
    """Most host memory that this rank pins, in bytes. Unset: a safe share of the host's memory, divided by the ranks
    of the node, and what the other ranks leave of theirs."""

    node_max_bytes: ByteSize | None = None
    """Most host memory that all ranks and jobs of this user pin on a node, in bytes; all of them must set it. Unset:
    half of what is available if ``max_bytes`` is unset too, else no bound."""

    quota_bytes: ByteSize | None = None
    """Most host memory that this engine has on lease from the rank's pool, in bytes, where several engines share it.
    Unset: what the pool has."""

    preallocate_bytes: ByteSize = 0
    """Host memory to take and page-lock in the background as soon as the engine is attached, in bytes: at most the
    bounds above, and no more than this rank's share. Default: 0, the pool grows in the first steps."""

    @field_validator("preallocate_bytes")
    @classmethod
    def _preallocated_within_bounds(cls, value: int, info: ValidationInfo) -> int:
        for key in ("max_bytes", "node_max_bytes"):
            bound = info.data.get(key)
            if bound is not None and value > bound:
                raise ValueError(f"at most host_pool.{key}, which is {bound} bytes")
        return value

    pin_memory: StrictBool = True
    """Page-lock the host memory. Copies overlap with compute only out of page-locked memory; ``false`` is for systems
    that refuse to pin, and is slow."""

    on_pin_failure: Literal["pageable", "keep"] = "pageable"
    """What happens when the system refuses to page-lock. ``"pageable"``: memory that is not page-locked is used, which
    is slow. ``"keep"``: as if the pool were full."""

    idle_trim_s: float | None = Field(default=120.0, ge=0, strict=True, allow_inf_nan=False)
    """Seconds without offloaded tensors (evaluation, generation, saving) after which the pool's memory goes back to the
    system; the next step takes it again. ``null``: never. Default: 120."""

    on_full: Literal["keep", "error"] = "keep"
    """What happens when the pool is full. ``"keep"``: the storage stays on the device, and is counted. ``"error"``: the
    step fails with ``HostPoolError``."""


class FineGrainedOffloadConfig(_Section):
    """Which submodules keep on the host what they save for backward, and how."""

    enabled: StrictBool = True
    """Whether anything is offloaded. A section that is present without this key is enabled; without a section nothing
    is offloaded."""

    modules: list[Pattern] = Field(default=[])
    """Patterns for the modules whose saved tensors are offloaded: shell globs over the names in
    ``model.named_modules()`` (``*`` also crosses dots), ``re:`` and a regular expression for the whole name, or
    ``class:`` and a class name. Each must match a module on some rank, and at least one is required when enabled, here
    or under ``recompute``."""

    exclude: list[Pattern] = Field(default=[])
    """Patterns, written as under ``modules``, for modules that keep their tensors on the device, with all that lies
    below them. Wins over ``modules``."""

    recompute: list[Pattern] = Field(default=[])
    """Patterns, written as under ``modules``, for modules that are computed again in backward: neither what they save
    nor their output is kept, their input is (or is offloaded, if they lie in one of ``modules``). For what is cheap,
    such as norms and activation functions. A module that cannot be computed again keeps what it saves, and a warning
    says why. ``exclude`` wins over this too."""

    policy: Literal["auto", "all"] = "auto"
    """``"all"``: every eligible storage of the modules is offloaded, and compute waits where the link is too slow for
    that. ``"auto"``: after a few rounds whose times are recorded, only what lowers the peak of device memory within
    ``max_overhead`` or ``target_saved_bytes``; more if the device would be too small otherwise. On a device without
    streams (CPU) as ``"all"``."""

    max_overhead: float | None = Field(default=None, ge=0, strict=True, allow_inf_nan=False)
    """Time for which compute may wait for copies, as a fraction of forward and backward (0.01 is one per cent), in
    exchange for more memory. Of ``policy`` ``"auto"``. Unset: it never waits, unless ``target_saved_bytes`` is set and
    takes that, or the device would be too small."""

    target_saved_bytes: ByteSize | None = None
    """Bytes by which the peak of device memory is to fall; no more is offloaded than reaches it. Of ``policy``
    ``"auto"``. Unset: as much as possible."""

    min_tensor_bytes: ByteSize = 1 << 20
    """A saved tensor stays on the device if its storage is smaller than this many bytes. Default: 1 MiB. 0: every size
    is offloaded."""

    plan_file: FilePath | None = None
    """Path of a JSON file that keeps what plans are made from: the next run, or a restart from a checkpoint, follows a
    plan from its first step. Written as training goes on; made, with its folder, if it is not there. ``{rank}`` in it
    is the rank's number, which the name gets otherwise where there are several. A file of another model, engine or
    machine is refused with the differences. Of ``policy`` ``"auto"`` on an accelerator. Unset: each run learns anew."""

    release_window_bytes: ByteSize | None = None
    """Bytes of storages under copy to the host that may still lie on the device in forward; beyond it the compute
    stream waits for the oldest copy and its memory is given back. Unset: memory is given back when its copy is known to
    be over, from the times of recorded rounds. 0: each copy is waited for at once. If this or the next key is set,
    nothing is planned."""

    prefetch_window_bytes: ByteSize | None = None
    """Bytes that may lie on the device at once in backward because they were copied back ahead of need. Unset:
    each storage comes back just in time, from the times of recorded rounds. 0: nothing is copied back before it is
    needed."""

    release_pipeline_buffers: StrictBool = False
    """Whether a ``PipelineEngine`` lets go of the last stage's outputs and labels and the first stage's inputs as soon
    as a micro-batch has gone backward, instead of keeping them until their buffer is used again. For a script that does
    not read ``engine.pipe_buffers`` itself. Without effect on other engines."""

    report_after_steps: int = Field(default=10, ge=0, strict=True)
    """After how many optimizer steps rank 0 prints the report; by the tenth a plan is followed. 0: never. The report at
    the end of ``ds_fgoffload.run`` does not depend on it. Plain modules take no steps that are seen."""

    host_pool: HostPoolConfig = HostPoolConfig()
    """The host memory that offloaded tensors lie in: how much, how it is taken and when it goes back."""

    @model_validator(mode="after")
    def _modules_are_named(self) -> FineGrainedOffloadConfig:
        if self.enabled and not self.modules and not self.recompute:
            raise ValueError('at least one pattern, such as "model.layers.*.mlp" (or set "enabled": false)')
        return self


def parse_config(section: Mapping[str, Any] | FineGrainedOffloadConfig | None) -> FineGrainedOffloadConfig:
    """The checked configuration; ``None`` (no section) is a disabled one.

    Raises :class:`OffloadConfigError` with one line per fault.
    """
    if section is None:
        return FineGrainedOffloadConfig(enabled=False)
    if isinstance(section, FineGrainedOffloadConfig):
        config = section
    else:
        plain = _plain(_checked_section(section))
        try:
            config = FineGrainedOffloadConfig.model_validate(plain)
        except ValidationError as error:
            raise OffloadConfigError("\n".join(_line(fault) for fault in error.errors())) from None
    windows = [key for key in ("release_window_bytes", "prefetch_window_bytes") if getattr(config, key) is not None]
    if windows or config.policy == "all":
        why = f"{windows[0]} is set" if windows else 'policy is "all"'
        for key in ("max_overhead", "target_saved_bytes"):
            if config.enabled and getattr(config, key) is not None:
                _warn_once(f"{SECTION}.{key} has no effect: {why}, and nothing is chosen then")
    if config.max_overhead is not None and config.max_overhead > 1:
        _warn_once(
            f"{SECTION}.max_overhead is a fraction: {config.max_overhead} lets compute wait for "
            f"{config.max_overhead:.0%} of the time that a step takes; five per cent is 0.05"
        )
    return config


def find_section(ds_config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | None:
    """The ``fine_grained_offload`` section of a whole ds_config, or ``None``.

    ``ds_config`` is what DeepSpeed takes: a dictionary, the path of a JSON or HJSON file, or base64 of JSON.
    """
    if ds_config is None:
        return None
    if isinstance(ds_config, str | Path):
        ds_config = _load(ds_config)
    if not isinstance(ds_config, Mapping):
        allowed = "a dictionary or the path of a JSON file"
        raise OffloadConfigError(f"ds_config: got {_shown(ds_config)}, allowed: {allowed}")
    section = ds_config.get(SECTION)
    return None if section is None else _checked_section(section)


def _load(source: str | Path) -> Any:
    try:
        if Path(source).exists():
            with Path(source).open(encoding="utf-8") as file:
                return hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (OSError, ValueError) as error:
        raise OffloadConfigError(f"ds_config {source}: cannot be read as JSON: {error}") from error
    try:
        return json.loads(base64.urlsafe_b64decode(str(source)))
    except (binascii.Error, ValueError):
        raise OffloadConfigError(f"ds_config {source}: no such file, and not base64 of JSON") from None


def _checked_section(section: object) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        allowed = 'an object such as {"modules": ["model.layers.*.mlp"]}'
        raise OffloadConfigError(f"{SECTION}: got {_shown(section)}, allowed: {allowed}")
    return section


def _plain(value: Any) -> Any:
    """A copy in which every mapping is a dict with text as keys, as JSON has them."""
    return {str(key): _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


_ALLOWED = {
    "bool_type": "true, false",
    "string_type": "text",
    "list_type": 'a list of patterns, such as ["encoder.*"]',
    "int_type": "a whole number >= 0",
    "float_type": "a number >= 0",
    "finite_number": "a number >= 0",
    "greater_than_equal": "a number >= 0",
    "model_type": "an object",
}


def _line(fault: Any) -> str:
    """One fault that pydantic found, in this package's words."""
    if not fault["loc"]:  # of the section as a whole there is one fault
        return f"{SECTION}.modules: got [], allowed: {fault['ctx']['error']}"
    where = ".".join([SECTION, *map(str, fault["loc"])])
    if fault["type"] == "extra_forbidden":
        model = HostPoolConfig if fault["loc"][:-1] == ("host_pool",) else FineGrainedOffloadConfig
        keys = list(model.model_fields)
        nearest = difflib.get_close_matches(str(fault["loc"][-1]), keys, n=1)
        hint = f" (nearest: {_shown(nearest[0])})" if nearest else ""
        return f"{where}: unknown key{hint}; allowed: {', '.join(map(_shown, keys))}"
    if fault["type"] == "literal_error":
        allowed = fault["ctx"]["expected"].replace("'", '"').replace(" or ", ", ")
    elif fault["type"] == "value_error":
        allowed = str(fault["ctx"]["error"])
    else:
        allowed = _ALLOWED.get(fault["type"], fault["msg"])
    remedy = "; leave the key out for the default" if fault["input"] == "auto" else ""
    return f"{where}: got {_shown(fault['input'])}, allowed: {allowed}{remedy}"


def _shown(value: object) -> str:
    """``value`` as the user wrote it in JSON, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
