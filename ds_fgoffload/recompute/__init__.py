"""Units whose forward runs again in backward instead of keeping what it saved.

Imports: ``saved``, ``schedule``, ``device``, ``compat``, ``text``. Start at :mod:`ds_fgoffload.recompute.recomputer`.
"""
