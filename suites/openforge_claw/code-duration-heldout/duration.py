"""Durations as text."""

import re


def seconds(text):
    """Seconds of a duration such as "1h30m", "2d", "45s" or "1d 2h 3m 4s".

    Units are d, h, m and s, each at most once and in this order; spaces between them are allowed, case does
    not matter. Anything else is a ValueError.
    """
    total = 0
    for number, unit in re.findall(r"(\d)([dhms])", text):
        total += int(number) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit]
    return total
