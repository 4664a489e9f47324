"""The words of `concepts/words.md` are a glossary, and the first use of each on another page is a link to it.

Pages stay plain Markdown, which GitHub shows as well, and no page can forget to link a word.
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
        if self.env.docname == GLOSSARY:
            return self._note_terms()
        if not self.env.docname.startswith(FOLDERS):
            return None
        left = dict(WORDS)
        for paragraph in list(self.document.findall(nodes.paragraph)):
            for text in list(paragraph.findall(nodes.Text)):
                # Not in code, in a link or in bold.
                if left and text.parent is paragraph:
                    self._link(text, left)
        return None

    def _note_terms(self) -> None:
        """Makes a term of each list item that begins with a word in bold."""
        for item in self.document.findall(nodes.list_item):
            if (bold := item.next_node(nodes.strong)) is not None:
                term = bold.astext()
                item["ids"].append(f"term-{term}")
                self.env.get_domain("std").note_object("term", term, f"term-{term}")

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
