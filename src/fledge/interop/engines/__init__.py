"""Engines that others wrote, run with an exported head."""
