"""The command line ``ds-fgoffload``: one module for each command, and their arguments in ``main``.

Imports: everything. Start at :mod:`ds_fgoffload.cli.main`.
"""
