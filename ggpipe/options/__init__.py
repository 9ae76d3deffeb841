"""All options of all front ends, and the settings and configs that they make."""
