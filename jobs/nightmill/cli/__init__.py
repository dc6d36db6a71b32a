"""The command line. Imports stay light: `nightmill status` answers in under 0.5 s."""
