"""Drafters: what proposes draft tokens, one file each, and what they share."""
