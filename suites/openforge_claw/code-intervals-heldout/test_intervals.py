from intervals import merge

assert merge([[1, 3], [2, 5]]) == [[1, 5]]
assert merge([[6, 8], [1, 3]]) == [[1, 3], [6, 8]], merge([[6, 8], [1, 3]])
assert merge([[1, 9], [2, 3]]) == [[1, 9]], merge([[1, 9], [2, 3]])
print("all tests pass")
