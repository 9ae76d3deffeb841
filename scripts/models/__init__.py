"""Models to measure with: random pairs, and how the bundled pair was trained."""
