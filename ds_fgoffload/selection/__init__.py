"""Which modules are units: patterns, ``@alias`` names and model families in, modules out.

Imports: ``config``, ``text``. Start at :mod:`ds_fgoffload.selection.patterns`.
"""
