"""What is known of a step beside its program: unused parameters, kept bytes, lost bits, the most memory."""
