"""What autograd holds instead of a saved tensor, and the copies that move its bytes.

Imports: ``profiling``, ``host_memory``, ``device``, ``compat``. Start at :mod:`ds_fgoffload.saved.saved_tensors`.
"""
