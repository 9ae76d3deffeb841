"""Measuring real ranks: profiles, links, benches, recordings."""
