"""What the runtime must know of a plain module, a ZeRO engine or a pipeline engine. Engines are known here alone.

Imports: ``runtime``, ``compat``, ``config``, ``text``. Start at :mod:`ds_fgoffload.engines.adapter`.
"""
