"""Tool calls: how models write them, and how templates present tools and results."""
