"""Text for people: log messages, module names in short form, sizes, sentences about a plan.

Imports: standard library and ``ds_fgoffload.stats``. Start at :mod:`ds_fgoffload.text.messages`.
"""
