"""The accelerator behind one interface: streams, fences, copies, memory, pinned host memory.

Imports: ``compat``. Start at :mod:`ds_fgoffload.device.streams`.
"""
