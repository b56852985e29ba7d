"""Cases: guarded steps on a state document, claimed, run and committed one at a time, with a journal to replay."""
