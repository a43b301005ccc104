"""The whole road from one recipe, stage by stage, resumable."""
