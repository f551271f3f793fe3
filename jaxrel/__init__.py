"""jaxrel: training runs that are not lost."""
