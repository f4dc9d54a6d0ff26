"""The built-in recipes: one module per name, each with an attribute `recipe`."""
