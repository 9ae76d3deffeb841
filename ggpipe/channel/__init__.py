"""The channel between a front end and the head of its ranks, with both of its sides."""
