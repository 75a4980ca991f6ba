"""What users read: the report, monitors, the recorded step as a page or a trace.

Imports: ``profiling``, ``host_memory``, ``saved``, ``text``. Start at :mod:`ds_fgoffload.reporting.report`.
"""
