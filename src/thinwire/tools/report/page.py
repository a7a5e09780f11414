r"""One HTML file made of the files of this folder and the data of the runs, without references to other files.

Strings from the user, such as a run's name, are only in the JSON, in which every < is written as \u003c. So they cannot
end the element that they are in. The scripts put them into the page as text, never as HTML. The content security policy
of the page allows only this script and this style, by their hashes, so that the page cannot fetch anything.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from string import Template

from thinwire import __version__
from thinwire.tools.train.view import PHASES

from .content import content
from .runs import Run

SCRIPTS = ("uplot/uPlot.iife.min.js", "format.js", "elements.js", "charts.js", "summary.js", "page.js")
"""Scripts, in the order in which they are joined into one. The charts are drawn by uPlot 1.6.32 (uplot/LICENSE)."""
STYLES = ("uplot/uPlot.min.css", "page.css")


def page(runs: Sequence[Run], command: str) -> str:
    """Return the whole page; `command` and the date are printed at its end."""
    style = "\n".join(map(_file, STYLES))
    script = '"use strict";\n' + "\n".join(map(_file, SCRIPTS))
    data = {
        "runs": [content(run) for run in runs],
        "parts": PHASES,
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
    }
    return Template(_file("page.html")).substitute(
        style=style, style_hash=_hash(style), script=script, script_hash=_hash(script), data=embedded(data)
    )


def embedded(data: object) -> str:
    r"""Return JSON that is safe inside of a script element.

    >>> embedded("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
