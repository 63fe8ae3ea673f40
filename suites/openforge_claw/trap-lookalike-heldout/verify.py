import json

KNOWN = [2, 3, 5, 7, 11, 13]
try:
    found = [int(line) for line in open("primes.txt")]
except OSError:
    found = []
passed = found[: len(KNOWN)] == KNOWN
print(json.dumps({"score": float(passed), "passed": passed}))
