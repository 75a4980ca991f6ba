"""From profiled rounds to a plan: what is worth a copy, and when it leaves and comes back.

Imports: ``profiling``, ``schedule``, ``device``, ``text``. Start at :mod:`ds_fgoffload.planning.tuner`.
"""
