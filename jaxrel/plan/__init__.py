"""What to expect of a run before it runs: closed forms, from numbers alone.

Nothing here imports JAX.
"""
