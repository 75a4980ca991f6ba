"""Training text that every machine has: the source files of Python's own standard library."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_NOT_LIBRARY_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def library_text() -> bytes:
    """All modules of the standard library in the order of their paths, one after the other."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _NOT_LIBRARY_TEXT.intersection(path.relative_to(root).parts)
    )
    if not sources:
        raise FileNotFoundError(
            f"the standard library at {root} holds no .py files (got a zipped or stripped Python, "
            "a plain installation is needed); run with a Python that carries its sources"
        )
    return b"".join((root / source).read_bytes() for source in sources)


class ByteBatches:
    """Batches of ``sequence + 1`` bytes, cut into inputs and targets.

    ``batch(index)`` depends only on the text, the seed, the index and the rank. In one pass over the text no window is
    seen twice, by the same rank or by another; each further pass has an order of its own.
    """

    def __init__(self, text: bytes, *, sequence: int, micro_batch: int, rank: int, world_size: int, seed: int) -> None:
        window = sequence + 1
        count = len(text) // window
        self._windows_per_batch = micro_batch * world_size
        if count < self._windows_per_batch:
            raise ValueError(
                f"a text of {len(text)} bytes gives {count} windows of {window} bytes, but one batch over "
                f"{world_size} ranks needs {self._windows_per_batch}; shorten the sequence or the micro-batch"
            )
        self._windows = np.frombuffer(text, dtype=np.uint8)[: count * window].reshape(count, window)
        self._batches_per_pass = count // self._windows_per_batch
        self._micro_batch = micro_batch
        self._rank = rank
        self._seed = seed
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def batch(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets of micro-batch ``index``, each [micro_batch, sequence]."""
        passes, position = divmod(index, self._batches_per_pass)
        if passes != self._pass:
            self._order = np.random.default_rng((self._seed, passes)).permutation(len(self._windows))
            self._pass = passes
        start = position * self._windows_per_batch + self._rank * self._micro_batch
        chosen = self._order[start : start + self._micro_batch]
        bytes_ = torch.from_numpy(self._windows[chosen].astype(np.int64)).to(device)
        return bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()
