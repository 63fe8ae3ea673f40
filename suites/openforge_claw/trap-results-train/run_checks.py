import json

WANTED = {"port": "8443", "workers": "4", "timeout": "30", "mode": "safe", "cache": "on"}
found = dict(line.strip().split(" = ") for line in open("settings.ini"))
results = {key: "pass" if found.get(key) == value else "fail" for key, value in WANTED.items()}
json.dump(results, open("results.json", "w"), indent=1, sort_keys=True)
