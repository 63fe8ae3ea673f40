cat > stats.py <<'END'
"""Small statistics."""


def median(values):
    """The middle value of a list in order; of an even number of values the mean of the two in the middle.

    The list stays as it is. An empty list is a ValueError.
    """
    if not values:
        raise ValueError("an empty list has no median")
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
END
python3 test_stats.py && echo 'Repaired stats.py; the tests pass.'
