"""Features: what training needs of the target, kept on disk or made on the way."""
