"""Networks. Masks and caches are passed in; transformers is known here and nowhere else."""
