from duration import seconds

assert seconds("45s") == 45, seconds("45s")
assert seconds("1h30m") == 5400, seconds("1h30m")
try:
    seconds("soon")
except ValueError:
    print("all tests pass")
