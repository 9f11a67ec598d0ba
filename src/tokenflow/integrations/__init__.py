"""One module for each library it goes with, which imports that library; each is an extra."""
