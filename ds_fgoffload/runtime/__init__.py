"""One attachment at work: module hooks and autograd's hooks in, schedule events out, acts carried out.

Imports: everything above but engines, reporting and what users start. Start at :mod:`ds_fgoffload.runtime.hooks`.
"""
