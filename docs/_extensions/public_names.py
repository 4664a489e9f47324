"""The directive `public-names`: the reference of each name in a module's `__all__`.

    .. public-names:: jaxpp_flax.trainers

A name that several modules export is described once, under the first of `MODULES`; the others link to it. Therefore the
reference is complete by construction: a name that is added to `__all__` is on the site.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

# In the order in which a name finds its place.
MODULES = (
    "jaxpp_flax",
    "jaxpp_flax.trainers",
    "jaxpp_flax.trainers.callbacks",
    "jaxpp_flax.layers",
    "jaxpp_flax.linen",
    "jaxpp_flax.schedules",
    "jaxpp_flax.planning",
    "jaxpp_flax.checkpoint",
    "jaxpp_flax.pretrained",
    "jaxpp_flax.verify",
    "jaxpp_flax.tasks",
    "jaxpp_flax.api",
    "jaxpp_flax.mpmd",
    "jaxpp_flax.processes",
    "jaxpp_flax.launch",
    "jaxpp_flax.launch.ray",
)

# Attributes without a leading underscore that only the parts of an object use.
INTERNAL = {
    "PipelineTrainer": ("clock", "guarded_tracker", "held", "measures", "pending")
}


def public_names(module: str) -> list[str]:
    """The names that the module exports, in its own order."""
    return list(import_module(module).__all__)


def home(module: str, name: str) -> str:
    """The first module that exports this very object under this name."""
    value = getattr(import_module(module), name)
    for other in MODULES:
        there = import_module(other)
        if name in there.__all__ and getattr(there, name) is value:
            return other
    return module


def directive(module: str, name: str) -> list[str]:
    """The lines of reStructuredText that describe one name."""
    value = getattr(import_module(module), name)
    path = f"{module}.{name}"
    if (owner := home(module, name)) != module:
        kind = (
            "class" if inspect.isclass(value) else "func" if callable(value) else "data"
        )
        return [f"- :py:{kind}:`{path} <{owner}.{name}>`", ""]
    if inspect.isclass(value):
        return _class(module, name, value)
    if inspect.isroutine(value):
        return [f".. autofunction:: {path}", ""]
    if isinstance(value, ModuleType):
        text = f"The module ``{value.__name__}``."
    elif type(value).__module__.startswith("jaxpp_flax"):
        text = (
            (inspect.getdoc(type(value)) or "")
            .partition("\n\n")[0]
            .replace("\n", " ")
            .replace("`", "``")
        )
    else:  # numbers, dictionaries and aliases of types
        text = f"``{value!r}``".replace("jax._src.mesh", "jax.sharding")
    return [f".. py:data:: {name}", "", f"   {text}", ""]


def _class(module: str, name: str, value: type) -> list[str]:
    """A class under its own name; or another name of a class, which is described here if nothing else exports it."""
    own = value.__name__
    if own == name:
        return [f".. autoclass:: {module}.{name}", *_members(value), ""]
    lines = [f".. py:data:: {name}", ""]
    for other in (module, *MODULES):
        if getattr(import_module(other), own, None) is value and own in public_names(
            other
        ):
            return [
                *lines,
                f"   Another name of :py:class:`{own} <{home(other, own)}.{own}>`.",
                "",
            ]
    real = f"{value.__module__}.{own}"
    return [
        *lines,
        f"   Another name of :py:class:`{own} <{real}>`.",
        "",
        f".. autoclass:: {real}",
        *_members(value),
        "",
    ]


def _members(value: type) -> list[str]:
    """The options that show the members of a class, with those that it has from bases without an entry of their own."""
    described = [
        base.__name__
        for base in value.__mro__[1:]
        if not base.__module__.startswith("jaxpp_flax")
        or any(base.__name__ in public_names(module) for module in MODULES)
    ]
    options = ["   :members:", f"   :inherited-members: {' '.join(described)}"]
    if internal := INTERNAL.get(value.__name__):
        options.append(f"   :exclude-members: {', '.join(internal)}")
    return options


class PublicNames(SphinxDirective):
    """The directive itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        elsewhere = [
            name for name in public_names(module) if home(module, name) != module
        ]
        here = [name for name in public_names(module) if home(module, name) == module]
        lines = [f".. py:module:: {module}", ""]
        for name in here:
            lines += directive(module, name)
        if elsewhere:
            lines += ["Exported here too:", ""]
        for name in elsewhere:
            lines += directive(module, name)
        return self.parse_text_to_nodes("\n".join(lines))


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name without an entry; `-W` makes that an error."""
    described = env.domains.python_domain.objects
    for module in MODULES:
        for name in public_names(module):
            if f"{home(module, name)}.{name}" not in described:
                logger.warning("%s.%s has no entry in the reference", module, name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
