"""The commands of ``ds-fgoffload``, one module each; :mod:`ds_fgoffload.cli` reads their arguments."""
