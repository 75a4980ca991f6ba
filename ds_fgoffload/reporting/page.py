"""A recorded step as one HTML file that needs nothing else: memory over time, copies, stalls, in light and dark."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from ds_fgoffload.profiling.recording import StepRecording, as_plain
from ds_fgoffload.text.names import families

_DATA, _TITLE = "/*DATA*/", "<!--TITLE-->"


def page(recording: StepRecording) -> str:
    """The file's text. ``page.html`` beside this module draws; here it gets its data."""
    data = as_plain(recording)
    names = dict.fromkeys(
        [entry.unit for group in (recording.storages, recording.calls, recording.stalls) for entry in group]
    )
    data["families"] = {member: family for family, members in families(names).items() for member in members}
    # "</" would end the script element in which the data stands
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    template = files("ds_fgoffload.reporting").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace(_TITLE, html.escape(recording.title)).replace(_DATA, text)
