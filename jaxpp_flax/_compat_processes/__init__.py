"""What several processes of a run need of JAX's private names."""
