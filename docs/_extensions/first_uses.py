"""The first use of a glossary's word on a page is a link to it.

Pages stay plain Markdown, which GitHub shows as well, and no page can forget a word that it uses.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

GLOSSARY = "concepts/words"
FOLDERS = ("start/", "guides/", "recipes/", "coming_from/")
# The forms of each word that link to it. "Mark" is also a verb, so only its noun does.
WORDS = {
    "mark": "marks",
    "stage": "stages?",
    "rank": "ranks?",
    "microbatch": "microbatch(?:es)?",
    "schedule": "schedules?",
    "residuals": "residuals?",
    "bubble": "bubbles?",
    "makespan": "makespan",
}


class FirstUses(SphinxTransform):
    """Puts the links in, before Sphinx resolves those that the page has itself."""

    default_priority = 500

    def apply(self, **options: object) -> None:
        if not self.env.docname.startswith(FOLDERS):
            return
        left = dict(WORDS)
        for paragraph in list(self.document.findall(nodes.paragraph)):
            for text in list(paragraph.findall(nodes.Text)):
                if (
                    left and text.parent is paragraph
                ):  # not in code, in a link or in bold
                    self._link(text, left)

    def _link(self, text: nodes.Text, left: dict[str, str]) -> None:
        """Links the words of ``left`` that the text has, and takes them out of ``left``."""
        content, parts, end = str(text), [], 0
        pattern = "|".join(rf"(?P<{word}>\b{forms}\b)" for word, forms in left.items())
        for match in re.finditer(pattern, content, re.IGNORECASE):
            word = str(match.lastgroup)
            if left.pop(word, None) is None:
                continue
            link = pending_xref(
                "",
                nodes.inline("", match[0]),
                refdomain="std",
                reftype="term",
                reftarget=word,
                refdoc=self.env.docname,
                refexplicit=True,
                refwarn=True,
            )
            parts += [nodes.Text(content[end : match.start()]), link]
            end = match.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(content[end:])])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(FirstUses)
    return {"parallel_read_safe": True}
