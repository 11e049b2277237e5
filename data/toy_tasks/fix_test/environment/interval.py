def overlap(a, b):
    """The length that two closed intervals (start, end) have in common."""
    return min(a[1], b[1]) - max(a[0], b[0])
