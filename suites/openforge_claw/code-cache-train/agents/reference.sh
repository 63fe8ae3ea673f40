python3 - <<'END'
code = open("cache.py").read()
code = code.replace(
    "        return self.values.get(key)\n",
    "        if key not in self.values:\n            return None\n"
    "        self.values[key] = self.values.pop(key)\n        return self.values[key]\n",
)
code = code.replace(
    "        if len(self.values) >= self.size:\n",
    "        self.values.pop(key, None)\n        if len(self.values) >= self.size:\n",
)
open("cache.py", "w").write(code)
END
python3 test_cache.py && echo 'Repaired cache.py; the tests pass.'
