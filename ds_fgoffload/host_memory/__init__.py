"""This rank's pinned host memory, within a budget that all ranks of the node share.

Imports: ``device``, ``text``. Start at :mod:`ds_fgoffload.host_memory.pool`.
"""
