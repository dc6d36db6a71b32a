"""The operations in C for processors: built at first use, called through ctypes, on torch's threads."""
