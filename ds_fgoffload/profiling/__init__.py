"""What the device did in a round and when: times of saves, uses, copies, waits and reads, taken without waiting.

Imports: ``schedule``, ``host_memory``, ``device``. Start at :mod:`ds_fgoffload.profiling.recorder`.
"""
