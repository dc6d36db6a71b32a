"""Plain torch truth for every operation: what each kernel is tested against."""
