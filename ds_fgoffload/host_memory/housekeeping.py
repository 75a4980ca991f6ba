"""A thread that lives while there is something to do: the host pool's growth ahead of need, and its housekeeping."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from deepspeed.utils import logger


class HousekeepingThread:
    """Calls ``work`` in a thread of its own, whenever it is woken and after as many seconds as ``work`` returned.

    The thread ends when ``work`` returns ``None``, raises, or its object is gone; :meth:`wake` starts it again.
    """

    def __init__(self, work: Callable[[], float | None]) -> None:
        self._work = weakref.WeakMethod(work)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def runs(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None

    def wake(self) -> None:
        """``work`` runs soon."""
        with self._lock:
            self._woken.set()
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="ds_fgoffload host pool", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread for good, after what it is doing now; used before the interpreter ends."""
        with self._lock:
            self._stopped = True
            self._woken.set()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def _run(self) -> None:
        delay_s: float | None = 0.0
        while True:
            self._woken.wait(delay_s)
            self._woken.clear()
            work = None if self._stopped else self._work()
            try:
                delay_s = None if work is None else work()
            except Exception as error:  # noqa: BLE001 - nothing that happens here may end training
                logger.warning(f"the host pool's thread ended: {type(error).__name__}: {error}")
                delay_s = None
            del work
            with self._lock:
                if delay_s is None and (self._stopped or not self._woken.is_set()):
                    self._thread = None
                    return
