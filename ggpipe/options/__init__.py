"""The options of all front ends, and the settings and configs that are made from them."""
