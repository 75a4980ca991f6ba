"""The file of a recorded step: it is written when the device has passed the step, and must not end the training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.profiling.recording import StepRecording
from ds_fgoffload.text.messages import warn_here


class StepFile:
    """Call it with the recording.

    Args:
        path: of the file; one that is there is written over.
        title: the recording's headline.
        facts: lines for the head of the page.

    Raises:
        OffloadStateError: there is no such folder, or nothing can be written there.
    """

    def __init__(self, path: Path, title: str, facts: Mapping[str, str]) -> None:
        folder = path.absolute().parent
        if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            msg = f"record: cannot write {path}: name a file in a folder that is there and may be written to"
            raise OffloadStateError(msg)
        self._path = path
        self._title = title
        self._facts = dict(facts)
        self.is_due = True
        """Whether no step has come yet."""

    def __call__(self, recording: StepRecording) -> None:
        self.is_due = False
        titled = replace(recording, title=self._title, facts={**self._facts, **recording.facts})
        try:
            self._path.write_text(titled.to_json(), encoding="utf-8")
        except OSError as error:
            warn_here(f"fine_grained_offload: the recorded step is lost: {self._path}: {error.strerror or error}")

    def warn_if_due(self) -> None:
        """There will be no more steps."""
        if self.is_due:
            warn_here(f"fine_grained_offload: {self._path} was not written: no step has begun since it was asked for")
