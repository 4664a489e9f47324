"""The search of a schedule for given costs, links and memory."""
