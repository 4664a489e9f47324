"""What traces of a step tell: the numbers of any size of a microbatch, and the work of the optimizer's update."""
