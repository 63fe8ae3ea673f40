python3 - <<'END'
from collections import Counter
failed = Counter()
for line in open("access.log"):
    _, request, rest = line.split('"')
    if int(rest.split()[0]) >= 500:
        failed[request.split()[1]] += 1
top = sorted(failed.items(), key=lambda item: (-item[1], item[0]))[:3]
open("worst.csv", "w").write("path,failures\n" + "".join(f"{p},{n}\n" for p, n in top))
END
echo 'The result is in worst.csv.'
