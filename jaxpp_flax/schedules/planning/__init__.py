"""Planning a step without devices: a model of its time and memory, and the choice of its residuals."""
