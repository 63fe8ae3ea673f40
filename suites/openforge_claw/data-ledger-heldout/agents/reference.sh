python3 - <<'END'
import csv
bank, books = ({r["payment"]: r["amount"] for r in csv.DictReader(open(n))} for n in ("bank.csv", "books.csv"))
with open("differences.csv", "w") as f:
    f.write("payment,bank,books\n")
    for p in sorted({*bank, *books}):
        if bank.get(p) != books.get(p):
            f.write(f"{p},{bank.get(p, '')},{books.get(p, '')}\n")
END
echo 'The result is in differences.csv.'
