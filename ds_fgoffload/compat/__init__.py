"""What this package needs of torch and DeepSpeed beyond their public interface, in one place.

Imports: nothing of this package. Start at :mod:`ds_fgoffload.compat.compiled`.
"""
