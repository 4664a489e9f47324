"""A quote: the fastest layouts of a training on devices that are not there."""
