"""Nightmill against other engines on one machine: `make bench-rivals`. docs/rivals.md says how it is kept fair."""
