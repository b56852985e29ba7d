"""Which tests of the core run once more on another server, or by another version of the code."""

PART = ["tests/core/test_attempt.py", "tests/core/test_claim.py", "tests/races/test_claims.py"]
"""At test size: a claim's whole way."""
ALL = ["tests/core", "tests/races"]
