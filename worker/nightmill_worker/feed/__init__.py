"""Rows to requests: chat template, tokenizer, look-ahead; and finished sequences back to text."""
