"""What keeps a run going from outside: a leader, an agent a host, and a pure core that decides.

Nothing here imports JAX: the supervisor starts at once and no device can hang it.
"""
