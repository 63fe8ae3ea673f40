python3 - <<'END'
import csv
from datetime import datetime
notations = ("%d.%m.%Y", "%m/%d/%Y", "%b %d %Y", "%d %B %Y", "%Y%m%d")
def iso(text):
    for notation in notations:
        try:
            return datetime.strptime(text, notation).strftime("%Y-%m-%d")
        except ValueError:
            pass
rows = sorted((iso(r["date"]), r["visit"]) for r in csv.DictReader(open("visits.csv")))
open("iso.csv", "w").write("date,visit\n" + "".join(f"{d},{v}\n" for d, v in rows))
END
echo 'The result is in iso.csv.'
