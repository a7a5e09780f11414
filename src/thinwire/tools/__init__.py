"""Command-line tools. They import the library; the library does not import them."""
