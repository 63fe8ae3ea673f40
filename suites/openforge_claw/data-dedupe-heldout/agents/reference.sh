python3 - <<'END'
import csv
newest = {}
for r in csv.DictReader(open("contacts.csv")):
    mail = r["mail"].strip().lower()
    if mail not in newest or r["updated"] > newest[mail][2]:
        newest[mail] = (mail, r["phone"], r["updated"])
with open("clean.csv", "w") as f:
    f.write("mail,phone,updated\n")
    f.writelines(",".join(newest[m]) + "\n" for m in sorted(newest))
END
echo 'The result is in clean.csv.'
