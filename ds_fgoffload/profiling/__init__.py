"""What the device did in a round and when: times of saves, uses, copies, waits and reads, taken without waiting.

Imports: ``host_memory``, ``schedule``, ``device``. Start at :mod:`ds_fgoffload.profiling.recorder`.
"""
