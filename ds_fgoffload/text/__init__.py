"""Text for people: log messages, module names in short form, sizes, sentences about a plan.

Imports: nothing of this package. Start at :mod:`ds_fgoffload.text.messages`.
"""
