"""The channel between a front end and the head of its ranks, and what both sides are to each other."""
