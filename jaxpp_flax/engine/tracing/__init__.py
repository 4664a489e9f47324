"""From a Python function to graphs: the intermediate representation, markers, `treduce`, canonical forms."""
