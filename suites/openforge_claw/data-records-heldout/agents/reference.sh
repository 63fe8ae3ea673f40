python3 - <<'END'
import json
with open("ready.csv", "w") as f:
    f.write("ship,place,crew\n")
    for line in open("ships.jsonl"):
        r = json.loads(line)
        names = sorted(c["name"] for c in r["crew"])
        if r["ship"]["place"] and len(names) > 1:
            f.write(f"{r['ship']['id']},{r['ship']['place']},{';'.join(names)}\n")
END
echo 'The result is in ready.csv.'
