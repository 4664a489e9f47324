"""The documentation site.

pip install -e ".[docs]"
sphinx-build -W --keep-going docs build/site        # the pages; runs the notebooks
sphinx-build -b linkcheck -D nb_execution_mode=off docs build/links    # the links to other sites; needs a network
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `_extensions`

# The notebooks' kernels inherit these: eight virtual CPU devices on every machine.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

project = "jaxpp_flax"
author = "the jaxpp_flax authors"
copyright = author
release = version = installed_version("jaxpp_flax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "_extensions.first_uses",
    "_extensions.public_names",
]
exclude_patterns = ["_extensions"]
html_theme = "sphinx_book_theme"
html_title = f"jaxpp_flax {release}"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search already
}
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["widths.css"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88  # longer ones have a line for each parameter
default_role = "code"
highlight_language = (
    "none"  # a block without a language is a picture or what a program prints
)
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
# Annotations name types of other packages and private aliases, which have no page here. Roles that a page writes out
# (`:doc:`, `:ref:`, Markdown links) are always checked.
nitpick_ignore_regex = [(r"py:.*", r".*")]
suppress_warnings = ["config.cache"]  # the functions below cannot be pickled

linkcheck_anchors = False
linkcheck_timeout = 20


def _name_the_moment(
    app, what, name, obj, options, lines
):  # the signature of the event
    """Napoleon knows the section "Raises", and not "Raises (when it is lowered)"."""
    for number, line in enumerate(lines):
        if found := re.fullmatch(r"Raises \((.+)\):", line):
            lines[number : number + 1] = [
                f"It raises errors {found[1]}.",
                "",
                "Raises:",
            ]


def _tell_modules_apart(app, what, name, obj, options, signature, returns):
    """NNX and Linen both have a `Module`."""

    def named(text):
        text = re.sub(r"~?flax\.nnx\.[\w.]*\bModule\b", "nnx.Module", text or "")
        return re.sub(r"~?flax\.linen\.[\w.]*\bModule\b", "nn.Module", text) or None

    return named(signature), named(returns)


def _as_rst(app, what, name, obj, options, lines):
    """Docstrings are Markdown in two ways: `code` may have letters behind it, and pages are named by their path."""
    text = re.sub(r"`docs/([\w/]+)\.md`", r":doc:`/\1`", "\n".join(lines))
    text = re.sub(r"(?<![`:\w\\])`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", r"``\1``\\ ", text)
    lines[:] = text.split("\n")


def _unlink_folders(app, name, source):
    """A link to a folder of the repository works on GitHub alone: on the site its text stays."""

    def replaced(found):
        target = HERE.joinpath(*Path(name).parts[:-1], found[2])
        return found[1] if target.is_dir() else found[0]

    source[0] = re.sub(r"\[([^\]]+)\]\(([^)#:\s]+)\)", replaced, source[0])


def setup(app):
    app.connect("source-read", _unlink_folders)
    app.connect(
        "autodoc-process-docstring", _name_the_moment, priority=100
    )  # before Napoleon, which has 500
    app.connect("autodoc-process-signature", _tell_modules_apart)
    app.connect("autodoc-process-docstring", _as_rst, priority=900)
