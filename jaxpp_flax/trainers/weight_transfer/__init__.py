"""The weights on their way to another layout: what goes, to which shardings, one leaf after another."""
