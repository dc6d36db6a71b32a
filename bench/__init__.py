"""Throughput and simulation, one command each."""
