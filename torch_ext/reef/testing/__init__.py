"""Suites of laws that anyone can run on classes of their own: ``python -m reef.testing.optim torch.optim.AdamW``."""
