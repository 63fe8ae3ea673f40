cat > duration.py <<'END'
"""Durations as text."""

import re

_FORM = re.compile(r"\s*(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?\s*", re.IGNORECASE)


def seconds(text):
    """Seconds of a duration such as "1h30m", "2d", "45s" or "1d 2h 3m 4s".

    Units are d, h, m and s, each at most once and in this order; spaces between them are allowed, case does
    not matter. Anything else is a ValueError.
    """
    found = _FORM.fullmatch(text)
    if found is None or not any(found.groups()):
        raise ValueError(f"{text!r} is no duration")
    return sum(int(n or 0) * size for n, size in zip(found.groups(), (86400, 3600, 60, 1)))
END
python3 test_duration.py && echo 'Repaired duration.py; the tests pass.'
