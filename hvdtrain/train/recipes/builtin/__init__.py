"""The built-in recipes: a module NAME, for Keras NAME_keras, with a function `recipe`."""
