"""Alembic migrations of the job store."""
