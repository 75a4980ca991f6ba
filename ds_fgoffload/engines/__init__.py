"""What the runtime must know of a plain module, a ZeRO engine or a pipeline engine. Engines are known here alone.

Imports: ``runtime`` and below. Start at :mod:`ds_fgoffload.engines.adapter`.
"""
