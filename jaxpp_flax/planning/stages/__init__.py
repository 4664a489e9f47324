"""Which blocks form a stage: policies, and the search of balanced stages."""
