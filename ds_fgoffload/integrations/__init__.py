"""Bridges to other libraries, imported only by those who use them.

Imports: ``engines``, ``config``. Start at :mod:`ds_fgoffload.integrations.transformers`.
"""
