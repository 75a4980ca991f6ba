"""The errors of this package: each says the cause, what was got, what is allowed, and the remedy."""


class OffloadConfigError(ValueError):
    """The ``fine_grained_offload`` section, or a pattern in it, asks for something that cannot be done."""


class OffloadStateError(RuntimeError):
    """An operation does not fit the state of an engine, an attachment or a saved tensor."""


class PlanFileError(ValueError):
    """A plan file cannot be read, or is not one."""


class HostPoolError(MemoryError):
    """The host pool cannot lend the memory that was asked for."""
