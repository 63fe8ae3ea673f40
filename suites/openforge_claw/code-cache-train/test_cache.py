from cache import Cache

cache = Cache(2)
cache.put("a", 1)
cache.put("b", 2)
assert cache.get("a") == 1
cache.put("c", 3)
assert cache.get("a") == 1, "a was used after b"
assert cache.get("b") is None
print("all tests pass")
