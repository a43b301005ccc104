"""What is on disk: the only thing that stages share."""
