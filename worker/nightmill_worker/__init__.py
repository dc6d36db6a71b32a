"""Nightmill worker: feeder, engine and models."""
