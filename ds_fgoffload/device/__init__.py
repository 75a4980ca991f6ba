"""The accelerator behind one interface: streams, fences, copies, memory, pinned host memory.

Imports: nothing of this package. Start at :mod:`ds_fgoffload.device.streams`.
"""
