"""What a step costs: FLOPs of the mathematics, and of the program that runs it."""

from jaxrel.throughput.model_flops import Count, Uncounted, count_flops

__all__ = ["Count", "Uncounted", "count_flops"]
