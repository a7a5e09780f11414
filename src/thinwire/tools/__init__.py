"""The commands: they use the library, and the library does not use them."""
