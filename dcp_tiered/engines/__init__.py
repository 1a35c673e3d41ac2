"""How bytes move between memory and a local file."""
