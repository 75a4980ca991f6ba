"""What users read: the report, monitors, the recorded step as a page or a trace.

Imports: ``saved``, ``profiling``, ``host_memory``, ``text``. Start at :mod:`ds_fgoffload.reporting.report`.
"""
