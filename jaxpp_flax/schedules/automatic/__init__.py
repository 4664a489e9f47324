"""Schedules found for given costs, links and memory."""

from .search import Found, Named, search

__all__ = ["Found", "Named", "search"]
