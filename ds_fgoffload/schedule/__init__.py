"""When storages leave the device and when they come back: events of the step in, acts out. Pure Python, no tensors.

Imports: nothing of this package. Start at :mod:`ds_fgoffload.schedule.schedule`.
"""
