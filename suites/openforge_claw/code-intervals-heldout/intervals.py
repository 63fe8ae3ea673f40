"""Intervals of whole numbers."""


def merge(intervals):
    """Intervals [start, end] joined where they overlap or touch ([1, 2] and [2, 5] give [1, 5]), in order.

    The intervals come in any order. One whose end lies before its start is a ValueError.
    """
    merged = []
    for start, end in intervals:
        if merged and start < merged[-1][1]:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged
