"""Text from outside made inert before it is shown: no control characters, one line, bounded length.

Run names, ids, reasons and host names come from producers. A terminal, a label or a page must never obey them.
"""

from __future__ import annotations

import hashlib
import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_LINKS = re.compile(r"(:(?=//)|@|#(?=\w)|www(?=\.))")
_LABEL_CHARS = 120


def plain(text: object, limit: int = 200) -> str:
    """One printable line of at most `limit` characters; terminal escapes and invisible characters are dropped."""
    # A hostile text may be megabytes long: cut before the slow part, with room for what is dropped.
    head = _ESCAPES.sub("", str(text)[: 4 * limit + 64])
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in head)
    line = " ".join(shown.split())
    return line if len(line) <= limit else line[: max(limit - 1, 0)] + "…"


def unlinked(text: str) -> str:
    """The text without anything that a chat or an issue tracker makes a link, a mention or a tag of."""
    return _LINKS.sub("\\1\u200b", text.replace("<", "‹").replace(">", "›"))


def label(text: object) -> str:
    """A metric label value: `plain`, and distinct texts stay distinct (a changed one ends in a hash of the whole)."""
    whole = str(text)
    shown = plain(whole, _LABEL_CHARS)
    if shown == whole:
        return whole
    digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{shown.rstrip('…')}~{digest}"
