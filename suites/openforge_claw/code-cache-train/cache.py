"""A cache that forgets."""


class Cache:
    """Holds `size` values at most; the one that was used longest ago goes first. get and put are uses."""

    def __init__(self, size):
        self.size = size
        self.values = {}

    def get(self, key):
        """The value of a key, None if it is not held."""
        return self.values.get(key)

    def put(self, key, value):
        """Hold a value; one of the same key is replaced."""
        if len(self.values) >= self.size:
            self.values.pop(next(iter(self.values)))
        self.values[key] = value


def play(size, steps):
    """What a cache gives for steps ["get", key] and ["put", key, value]: the values of the gets."""
    cache = Cache(size)
    return [cache.get(*s[1:]) for s in steps if s[0] == "get" or cache.put(*s[1:])]
