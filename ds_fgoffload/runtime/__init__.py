"""One attachment at work: module hooks and autograd's hooks in, schedule events out, acts carried out.

Imports: ``recompute``, ``planning``, ``saved``, ``host_memory``, ``schedule``, ``compat``, ``text``.
Start at :mod:`ds_fgoffload.runtime.hooks`.
"""
