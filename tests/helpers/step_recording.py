"""The recording made by hand that ``ds-fgoffload draw --sample`` draws; tests and pictures use it too."""

from ds_fgoffload.cli.sample import MIB, recording

__all__ = ["MIB", "recording"]
