"""From prompts, or none, to the target's own answers as token ids with a loss mask."""
