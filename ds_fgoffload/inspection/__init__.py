"""What a model saves for backward, module by module, watched without moving anything.

Imports: ``saved``, ``selection``, ``device``, ``compat``, ``text``. Start at :mod:`ds_fgoffload.inspection.watcher`.
"""
