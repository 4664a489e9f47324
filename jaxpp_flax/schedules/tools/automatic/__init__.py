"""Schedules found for given costs, links and memory."""

from jaxpp_flax.schedules.tools.automatic.search import Found, Named, search

__all__ = ["Found", "Named", "search"]
