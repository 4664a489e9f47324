"""The bodies of a loop: of microbatches of one shape or of several, and what they may not do."""
