"""What the bytes are: values in, bytes out. No I/O, no clock, no torch."""
