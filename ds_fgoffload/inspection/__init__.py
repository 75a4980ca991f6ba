"""What a model saves for backward, module by module, watched without moving anything.

Imports: ``saved``, ``selection``, ``text``. Start at :mod:`ds_fgoffload.inspection.watcher`.
"""
