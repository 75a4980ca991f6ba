"""What autograd holds instead of a saved tensor, and the copies that move its bytes.

Imports: ``profiling``, ``schedule``, ``host_memory``, ``device``. Start at :mod:`ds_fgoffload.saved.saved_tensors`.
"""
