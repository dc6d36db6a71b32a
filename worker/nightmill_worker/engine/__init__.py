"""The engine's policy and bookkeeping: scheduler, page pool, prefix index. No torch in here."""
