"""What all tests run under: one thread, no collector that looks through all imports, long files first."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Lets xdist take files in the order given below, not those with the most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes take the longest, and so come first: then two workers end at about the same time."""
    long = {item.path for item in items if item.get_closest_marker("ranks") and not item.get_closest_marker("full")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are small, so that a second thread only costs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Some tests collect garbage often, which takes a tenth of a second with all that others have imported."""
    gc.collect()
    gc.freeze()
