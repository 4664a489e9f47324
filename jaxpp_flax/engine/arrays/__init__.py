"""Arrays on ranks: meshes, `MpmdArray`, shardings, resharding, placing."""
