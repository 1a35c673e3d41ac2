"""What should happen: values in, decisions out. No I/O, no clock."""
